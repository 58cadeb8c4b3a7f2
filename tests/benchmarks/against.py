"""Two checkouts in one run: has the second become slower?

    ranks of the first     | A     A |     B | B     C |
    ranks of the second    |   A A   |   B   |   B C   |   ...      one turn at a time

Each checkout's package is trained by ranks of its own, with the benchmark that stands beside it, or
this one's where none does. The parent lets one pair of ranks take a turn while the other sleeps, so
that noise hits both alike. torch DDP and training without communication are the same in both: what
differs there is noise, and more than that, and a limit beside it, is a regression.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from statistics import median

from rich.console import Console

from tests.benchmarks.ranks import make_store
from tests.benchmarks.report import table_of
from tests.benchmarks.timing import Ratio, Record
from tests.benchmarks.turns import BEFORE_AND_AFTER, go, over

REPOSITORY = Path(__file__).parents[2]
CONTROLS = ("ddp", "local")
OURS = ("shard_ddp", "zero1", "zero2", "zero3")
LIMIT = 0.03
Records = Mapping[str, Record]


@dataclass(frozen=True)
class Comparison:
    """Step times of the second checkout over those of the first.

    Attributes:
        ratios: By contender, of the rounds.
        cpu_ratios: The same of processor time, medians over medians.
        noise: How far a contender is from 1 whose code is the same in both.
    """

    ratios: dict[str, Ratio]
    cpu_ratios: dict[str, float]
    noise: float

    @classmethod
    def of(cls, before: Records, after: Records) -> "Comparison":
        """Compare the records of two checkouts."""
        ratios = {name: Ratio.of(after[name], before[name]) for name in after}
        cpu = {name: _cpu(after[name]) / _cpu(before[name]) for name in after}
        noise = max(abs(ratios[name].median - 1) for name in CONTROLS)
        return cls(ratios=ratios, cpu_ratios=cpu, noise=noise)

    def slower(self) -> list[str]:
        """Return the contenders that are slower by more than the limit and the noise."""
        most = 1 + LIMIT + self.noise
        return [name for name, one in self.ratios.items() if one.median > most]

    def as_dict(self) -> dict[str, object]:
        """Return all of it for JSON."""
        return {**asdict(self), "limit": LIMIT, "slower": self.slower()}


def _cpu(record: Record) -> float:
    return median(record.cpu_seconds)


@contextmanager
def checkout(ref: str) -> Iterator[Path]:
    """Have package and tests of a commit in a folder inside, or a folder which has the package."""
    if Path(ref, "lightning_shard").is_dir():
        yield Path(ref).resolve()
        return
    archive = ["git", "-C", str(REPOSITORY), "archive", ref, "lightning_shard", "tests"]
    packed = subprocess.run(archive, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as archived:
            archived.extractall(folder, filter="data")
        yield Path(folder)


def time_checkouts(
    checkouts: Sequence[Path],
    model_name: str,
    names: Sequence[str],
    num_rounds: int,
    num_steps: int,
) -> list[dict[str, Record]]:
    """Time contenders with the packages of two checkouts, turn by turn."""
    store = make_store(0, is_master=True)
    sizes = [str(size) for size in (num_rounds, num_steps)]
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in checkouts]
        running = {}
        for side, folder, source in zip(BEFORE_AND_AFTER, folders, checkouts, strict=True):
            arguments = [side, str(store.port), model_name, *sizes, *names]
            running[side] = stack.enter_context(_trained_by(folder, source, arguments))
        for number in range(len(names) * (num_rounds + 1)):
            for side in BEFORE_AND_AFTER[:: 1 if number % 2 else -1]:
                store.set(go(side, number), "")
                _wait(store, over(side, number), running)
        for process in running.values():
            process.wait()
        return [_read(folder / "records.json") for folder in folders]


@contextmanager
def _trained_by(
    folder: Path, source: Path, arguments: Sequence[str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run ranks with a checkout's package and benchmark; end them with the block."""
    (folder / "lightning_shard").symlink_to(source / "lightning_shard")
    its_own = source / "tests"
    (folder / "tests").symlink_to(its_own if its_own.is_dir() else REPOSITORY / "tests")
    command = [sys.executable, "-P", "-m", "tests.benchmarks.turns", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.terminate()  # does nothing to one that has ended
        process.wait()


def _wait(store: object, key: str, running: "Mapping[str, subprocess.Popen[bytes]]") -> None:
    while not store.check([key]):  # type: ignore[attr-defined]
        for side, process in running.items():
            if process.poll():
                raise RuntimeError(f"The ranks with the package from {side} have failed.")
        time.sleep(0.005)


def _read(path: Path) -> dict[str, Record]:
    return {name: Record(**record) for name, record in json.loads(path.read_text()).items()}


def print_comparison(console: Console, comparison: Comparison, ref: str) -> None:
    """Print a row for each contender, and the verdict."""
    table = table_of(f"Step time, this checkout over {ref}", ("ratio", "quartiles", "CPU ratio"))
    for name, ratio in comparison.ratios.items():
        cells = f"{ratio.median:.3f}", f"{ratio.low:.2f}-{ratio.high:.2f}"
        table.add_row(name, *cells, f"{comparison.cpu_ratios[name]:.3f}")
    console.print(table)
    slower = ", ".join(comparison.slower())
    console.print(f"Slower than {1 + LIMIT:.2f} and the noise of {comparison.noise:.3f}:", end=" ")
    console.print(slower or "none")
