"""Where a contender's step goes: its phases, torch's operators, Python's functions.

The phases are timed without a profiler, in interleaved rounds of all contenders asked for, by the
clock and by the rank's processor time (all threads, those that send included; it tells more on a
busy machine). "rest" is what entering and leaving the engine's step costs. The operators and
functions are of the first contender and of rank 0, each from steps of its own: a profiler slows
what it watches, so read them for shares, not for seconds.
"""

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.contenders import Contender
from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.model import build_model, make_batch
from tests.benchmarks.ranks import finish, own_device
from tests.benchmarks.timing import NUM_WARMUP_STEPS, turn_order

PHASES = ("forward", "zero_grad", "backward", "optimizer", "rest")
NUM_ROWS = 25


class Stopwatch:
    """Seconds of each phase by some clock, one entry per step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        begin = self._clock()
        yield
        self._seconds[name].append(self._clock() - begin)

    def medians(self) -> dict[str, float]:
        """Return each phase's median, and the step's as "total"."""
        parts = zip(*(self._seconds[name] for name in PHASES[:-1]), strict=True)
        totals = self._seconds["total"]
        rests = [total - sum(part) for total, part in zip(totals, parts, strict=True)]
        every = {**self._seconds, "rest": rests}
        return {name: median(every[name]) for name in (*PHASES, "total")}


class Stopwatches:
    """One by the clock and one by the processor's time."""

    def __init__(self) -> None:
        self.wall = Stopwatch(time.perf_counter)
        self.cpu = Stopwatch(time.process_time)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside, by both."""
        with self.wall.phase(name), self.cpu.phase(name):
            yield


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What rank 0 saw.

    Attributes:
        wall_seconds: Median seconds of each of `PHASES` and of "total", by contender.
        cpu_seconds: The same of the processor's time.
    """

    wall_seconds: dict[str, dict[str, float]]
    cpu_seconds: dict[str, dict[str, float]]
    operators: str
    functions: str


def profile_contenders(
    rank: int, model_name: str, names: Sequence[str], num_rounds: int, num_steps: int
) -> Profile:
    """Time the phases of `names` and profile the first of them; each rank calls."""
    contenders = {
        name: CONTENDERS[name].make(build_model(model_name).to(own_device())) for name in names
    }
    for contender in contenders.values():
        _train(rank, contender, Stopwatches(), NUM_WARMUP_STEPS)
    watches = {name: Stopwatches() for name in names}
    for round_index in range(num_rounds):
        for name in turn_order(names, round_index):
            _train(rank, contenders[name], watches[name], num_steps)
    first = contenders[names[0]]
    return Profile(
        wall_seconds={name: watch.wall.medians() for name, watch in watches.items()},
        cpu_seconds={name: watch.cpu.medians() for name, watch in watches.items()},
        operators=_operators(rank, first, num_steps),
        functions=_functions(rank, first, num_steps),
    )


def _train(rank: int, contender: Contender, watch: Stopwatches, num_steps: int) -> None:
    finish()
    for step in range(num_steps):
        batch = make_batch(step, rank, own_device())
        with watch.phase("total"):
            contender.step(batch, watch.phase)


def _operators(rank: int, contender: Contender, num_steps: int) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _train(rank, contender, Stopwatches(), num_steps)
    averages = profiler.key_averages()
    return str(averages.table(sort_by="self_cpu_time_total", row_limit=NUM_ROWS))


def _functions(rank: int, contender: Contender, num_steps: int) -> str:
    profiler = cProfile.Profile()
    profiler.enable()
    _train(rank, contender, Stopwatches(), num_steps)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(NUM_ROWS)
    return text.getvalue()
