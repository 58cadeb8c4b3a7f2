"""How long a save and a load take, and what memory: ours beside Lightning's and DCP's, in one run.

python -m tests.benchmarks.checkpoints          two ranks over Gloo, 100 million parameters
python -m tests.benchmarks.checkpoints --folder /dev/shm --only dcp sharded

Each contender trains two steps with AdamW in two processes of its own and saves a few times. Ours
and DCP's files are on the disk when a save returns; of Lightning's the time to flush them is told
beside. Right before each save two yardsticks are taken: "copy", of what a rank has into memory that
was used before, and "disk", in which the ranks that write write as many bytes in the plainest way
(1 MB at a time, then fsync). "load" is how much longer a fit takes to its first step if it resumes
from the last of the files, which the system has forgotten by then. All figures are medians over the
saves but the first.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from lightning_shard import DDPStrategy, ZeRO3Strategy
from tests.benchmarks import checkpoints
from tests.processes import run_processes
from tests.trainers import cpu_trainer

NUM_RANKS = 2
NUM_BLOCKS = 12
_OURS: dict[str, Any] = {"backend": "gloo", "announce": False}
CONTENDERS: dict[str, Callable[[], Any]] = {
    "Lightning ddp": lambda: LightningDDPStrategy(process_group_backend="gloo"),
    "Lightning ModelParallel": lambda: ModelParallelStrategy(
        NUM_RANKS, 1, process_group_backend="gloo"
    ),
    "dcp": lambda: ZeRO3Strategy(**_OURS),
    "full shard_ddp": lambda: DDPStrategy(**_OURS),
    "full zero3": lambda: ZeRO3Strategy(**_OURS),
    "sharded": lambda: ZeRO3Strategy(**_OURS, checkpoint_format="sharded"),
    "async": lambda: ZeRO3Strategy(**_OURS, checkpoint_format="sharded", async_save=True),
}
ONE_WRITES = ("Lightning ddp", "full shard_ddp", "full zero3")


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, width) to the same."""
        return x + self.down(torch.relu(self.up(x)))


class Model(L.LightningModule):
    """Blocks of 8 * width ** 2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList([Block(width) for _ in range(NUM_BLOCKS)])

    @override
    def configure_model(self) -> None:
        """Apply FSDP2 for Lightning's `ModelParallelStrategy`, once."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for block in self.blocks:
                if not isinstance(block, FSDPModule):
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    @override
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, self.width), batch_size=2)  # type: ignore[arg-type]


class Saving(L.Callback):
    """Saves a few times after the second step, and measures it.

    Attributes:
        measured: Of each save its seconds, those until all is on the disk, those of the yardsticks,
            bytes, and the peak of this rank's own memory above training's.
    """

    last: Path
    load: float

    def __init__(self, name: str, folder: Path, num_saves: int) -> None:
        self.measured: list[dict[str, float]] = []
        self._name, self._folder, self._num_saves = name, folder, num_saves

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != 2 or self.measured:
            return
        for number in range(self._num_saves):
            path = self._folder / f"{number}.ckpt"
            copy, disk = seconds_of_copy(trainer), self._seconds_of_disk(trainer)
            trainer.strategy.barrier()
            begun = time.perf_counter()
            with peak_above() as peak:
                self._save(trainer, path)
                seconds = time.perf_counter() - begun
                self._complete(trainer, path)
                trainer.strategy.barrier()
            complete = time.perf_counter() - begun
            self.measured.append(
                {"seconds": seconds, "complete": complete, "copy": copy, "disk": disk,
                 "bytes": size_of(path), "peak": peak[0]}
            )  # fmt: skip
            trainer.strategy.barrier()
            if trainer.global_rank == 0 and number < self._num_saves - 1:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.last = path
        if self._name == "dcp":
            self.load = self._seconds_of_dcp_load(trainer)

    def _seconds_of_disk(self, trainer: Any) -> float:
        """Return how long the ranks that write take for as many bytes in the plainest way."""
        num_bytes = sum(one.nbytes for one in shards_of(trainer).values())
        if self._name == "full zero3":
            num_bytes *= NUM_RANKS
        writes = trainer.global_rank == 0 or self._name not in ONE_WRITES
        trainer.strategy.barrier()
        begun = time.perf_counter()
        path = self._folder / f"plain_{trainer.global_rank}"
        if writes:
            write_plainly(path, num_bytes)
        trainer.strategy.barrier()
        seconds = time.perf_counter() - begun
        path.unlink(missing_ok=True)
        return seconds

    def _seconds_of_dcp_load(self, trainer: Any) -> float:
        own = {f"{trainer.global_rank}.{key}": value for key, value in shards_of(trainer).items()}
        forget(self.last)
        trainer.strategy.barrier()
        begun = time.perf_counter()
        dcp_load(own, checkpoint_id=self.last)
        trainer.strategy.barrier()
        return time.perf_counter() - begun

    def _save(self, trainer: Any, path: Path) -> None:
        if self._name != "dcp":
            trainer.save_checkpoint(path)
            return
        own = {f"{trainer.global_rank}.{key}": value for key, value in shards_of(trainer).items()}
        dcp_save(own, checkpoint_id=path)

    def _complete(self, trainer: Any, path: Path) -> None:
        if self._name == "async":
            trainer.strategy.finish_save()
        if self._name.startswith("Lightning") and trainer.global_rank == 0:
            for file in [path] if path.is_file() else path.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())


class Begun(L.Callback):
    """Notes when a fit comes to its first step."""

    at: float

    @override
    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.barrier()
        self.at = time.perf_counter()


def write_plainly(path: Path, num_bytes: int) -> None:
    """Write so many bytes as `dd bs=1M conv=fsync` does."""
    block = bytearray(os.urandom(1 << 20))
    with path.open("wb", buffering=0) as file:
        for begin in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - begin])
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Have the system forget what it has of a checkpoint's files in memory."""
    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shards_of(trainer: Any) -> dict[str, Tensor]:
    """Return what a rank has of parameters and of the optimizer's state, by any names."""
    flats = getattr(getattr(trainer.strategy, "_engine", None), "flats", None)
    params = (
        [p.detach() for p in trainer.model.parameters()]
        if flats is None
        else [f.shard for f in flats]
    )
    states = [
        one
        for state in trainer.optimizers[0].state.values()
        for one in state.values()
        if isinstance(one, Tensor) and one.ndim
    ]
    tensors = [one.to_local() if hasattr(one, "to_local") else one for one in (*params, *states)]
    return {str(number): one for number, one in enumerate(tensors)}


def seconds_of_copy(trainer: Any) -> float:
    """Return the least seconds of three copies of the shards into one memory."""
    shards = list(shards_of(trainer).values())
    memory, times = [torch.zeros_like(one) for one in shards], []
    for _ in range(3):
        begun = time.perf_counter()
        for target, source in zip(memory, shards, strict=True):
            target.copy_(source)
        times.append(time.perf_counter() - begun)
    return min(times)


@contextmanager
def peak_above() -> Iterator[list[float]]:
    """Watch this process's own memory; the list then holds the peak above the beginning, in MB."""
    begin, done = own_megabytes(), threading.Event()
    peak = [0.0]

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], own_megabytes() - begin)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def own_megabytes() -> float:
    """Return how much memory this process has that is no file's."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def size_of(path: Path) -> float:
    """Return the bytes of a file or of a folder's files."""
    files = [path] if path.is_file() else list(path.rglob("*"))
    return float(sum(file.stat().st_size for file in files if file.is_file()))


def measure(name: str, width: int, folder: Path, num_saves: int, *, loads: bool) -> dict[str, Any]:
    """Train a contender on this rank, and return what was measured of each save and of a load."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    saving = Saving(name, folder, num_saves)
    fit(name, width, saving, None)
    if name == "dcp":
        return {"saves": saving.measured, "load": saving.load}
    if not loads:
        return {"saves": saving.measured, "load": nan}
    plain = seconds_to_first_step(name, width, None)
    forget(saving.last)
    resumed = seconds_to_first_step(name, width, saving.last)
    return {"saves": saving.measured, "load": resumed - plain}


def seconds_to_first_step(name: str, width: int, path: Path | None) -> float:
    """Return how long a fit takes to its first step."""
    begun, start = Begun(), time.perf_counter()
    fit(name, width, begun, path)
    return begun.at - start


def fit(name: str, width: int, callback: L.Callback, path: Path | None) -> None:
    """Train two steps, or one more than a checkpoint has."""
    cpu_trainer(
        strategy=CONTENDERS[name](),
        devices=NUM_RANKS,
        max_steps=2 if path is None else 3,
        callbacks=[callback],
    ).fit(Model(width), ckpt_path=path, weights_only=False)


def main() -> None:
    """Run the contenders one after the other and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkpoints")
    parser.add_argument("--width", type=int, default=1024, help="100 million parameters")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="where to save; left out: the temporary folder")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--no-load", action="store_true", help="save only")
    arguments = parser.parse_args()
    columns = ("save", "complete", "copy", "disk", "MB/s", "disk MB/s", "load")
    table = Table("seconds", *columns, "peak MB, ranks", "MB")
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            ranks = run_processes(
                checkpoints.measure,  # by a name that other processes can import
                NUM_RANKS,
                timeout_seconds=600,
                fresh=True,
                name=name,
                width=arguments.width,
                folder=Path(folder),
                num_saves=arguments.saves,
                loads=not arguments.no_load,
            )
        row = cells(ranks)
        table.add_row(name, *row)
        print(name, *row, sep="  ", file=sys.stderr, flush=True)
    Console().print(table)


def cells(ranks: list[dict[str, Any]]) -> list[str]:
    """Return a row: medians over all saves but the first, on rank 0, and each rank's peak."""
    saves = [one["saves"] for one in ranks]
    later = saves[0][1:] or saves[0]
    middle = {key: median(one[key] for one in later) for key in later[0]}
    megabytes = middle["bytes"] / 1e6
    return [
        *(f"{middle[key]:.2f}" for key in ("seconds", "complete")),
        f"{middle['copy']:.3f}",
        f"{middle['disk']:.2f}",
        f"{megabytes / middle['complete']:.0f}",
        f"{megabytes / middle['disk']:.0f}",
        f"{ranks[0]['load']:.2f}",
        ", ".join(f"{max(one['peak'] for one in own):.0f}" for own in saves),
        f"{megabytes:.0f}",
    ]


if __name__ == "__main__":
    main()
