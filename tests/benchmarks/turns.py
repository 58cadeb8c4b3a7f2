"""Ranks of one of two checkouts, which wait for their turns; `against` starts them.

python -m tests.benchmarks.turns before|after PORT MODEL ROUNDS STEPS NAME ...
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path

from tests.benchmarks.ranks import TIMEOUT, make_store, on_ranks
from tests.benchmarks.timing import Record, time_contenders

BEFORE_AND_AFTER = ("before", "after")


def go(side: str, number: int) -> str:
    """Return the key that stands in the store once a turn may begin."""
    return f"{side}/{number}/go"


def over(side: str, number: int) -> str:
    """Return the key that stands in the store once a turn is over."""
    return f"{side}/{number}/over"


def _turns(rank: int, side: str, port: int) -> Callable[[], AbstractContextManager[None]]:
    """Return what encloses each turn of a rank: it waits until the parent says go."""
    store, numbers = make_store(port, is_master=False), count()

    @contextmanager
    def turn() -> Iterator[None]:
        number = next(numbers)
        store.wait([go(side, number)], TIMEOUT)
        yield
        if rank == 0:
            store.set(over(side, number), "")

    return turn


def _time(
    rank: int, side: str, port: int, model_name: str, names: Sequence[str], sizes: Sequence[int]
) -> dict[str, Record]:
    turn = _turns(rank, side, port)
    return time_contenders(rank, model_name, names, *sizes, report=lambda _: None, turn=turn)


def main(side: str, port: str, model_name: str, rounds: str, steps: str, *names: str) -> None:
    """Train, and write the records into this folder."""
    sizes = int(rounds), int(steps)
    records = on_ranks(_time, side, int(port), model_name, names, sizes)
    as_json = {name: asdict(record) for name, record in records.items()}
    Path("records.json").write_text(json.dumps(as_json))


if __name__ == "__main__":
    main(*sys.argv[1:])
