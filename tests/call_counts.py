"""Calls of the package's functions, counted by name, and which of them grow too fast."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

MOST_GROWTH = 2.2  # of the calls that are added, by twice as many
FEW = 24  # calls that may come or go, as of weak references that the garbage collector ends


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count the calls inside of each function of the package, on this thread and those begun."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/lightning_shard/" in file:
            counts[f"{file.rpartition('/lightning_shard/')[2]}:{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def growing_too_fast(run: Callable[[int], object], size: int) -> dict[str, tuple[int, int, int]]:
    """Run three sizes, each twice the last; return the calls of what grows faster than the size.

    The second doubling may add twice the calls of the first: what is called once for a run counts
    for nothing, and a function that is called for every pair of things is found.
    """
    run(size)  # what is made once for a process
    counted = []
    for factor in (1, 2, 4):
        with counting_calls() as counts:
            run(factor * size)
        counted.append(counts)
    few, more, many = counted
    return {
        name: (few[name], more[name], calls)
        for name, calls in many.items()
        if calls - more[name] > MOST_GROWTH * (more[name] - few[name]) + FEW
    }
