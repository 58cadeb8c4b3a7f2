"""Run a function on several ranks in this process; for tests, notebooks and debugging."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.in_process.faults import Fault, injected_faults
from lightning_shard.backends.in_process.world import World
from lightning_shard.backends.traffic import OPERATIONS, OperationTraffic
from lightning_shard.errors import ConfigError

__all__ = ["Fault", "injected_faults", "run_ranks"]

T = TypeVar("T")
_MAX_SEED = 2**32 - 1


def run_ranks(
    fn: Callable[[int], T], num_ranks: int, *, seed: int = 0, faults: Iterable[Fault] = ()
) -> list[T | None]:
    """Run `fn(rank)` on every rank with `torch.distributed` initialised.

    Ranks are threads of this process and one runs at a time, switched at collectives in the same
    order on every run. Rank 0 runs on the calling thread. Each has its own random streams (torch,
    numpy, random), seeded with `seed + rank`. The process's globals are as before afterwards.

    Args:
        fn: Called with the rank, 0 to `num_ranks - 1`.
        num_ranks: Number of ranks.
        seed: Seed of rank 0; rank r gets `seed + r`.
        faults: The faults to inject.

    Returns:
        The result of each rank, in rank order; None for a rank that a fault dropped.

    Raises:
        ConfigError: An argument is wrong, or this is called inside an in-process world.
        DeadlockError: No rank can run and not every rank has finished.
        CollectiveMismatchError: Ranks of a group called different operations.
        BaseException: The error of the first rank to fail, with a note that names the rank.
    """
    world = make_world(num_ranks, seed, faults)

    def begin(rank: int) -> T:
        torch.manual_seed(seed + rank)
        np.random.seed(seed + rank)
        random.seed(seed + rank)
        InProcessBackend().init_process_group(
            rank=rank, world_size=num_ranks, device=torch.device("cpu"), timeout=DEFAULT_TIMEOUT
        )
        return fn(rank)

    return world.run(begin)


def make_world(num_ranks: int, seed: int, faults: Iterable[Fault]) -> World:
    """Make the world that `run_ranks` runs in."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"run_ranks: got seed={seed!r}, expected an integer.")
    world = World(num_ranks, faults)
    if not 0 <= seed <= _MAX_SEED - num_ranks:
        raise ConfigError(
            f"run_ranks: got seed={seed}, expected 0 to {_MAX_SEED - num_ranks}, so that "
            "seed + rank is a seed for numpy too."
        )
    return world


# Asserts what a rank sends inside a block of code.
#
#     with assert_traffic(collectives, all_gather=Expected(calls=2, bytes=4096)):
#         step()
#
#     AssertionError: Traffic on rank 0 of 2, group 'default_pg', is not as expected.
#     operation   counter  got  expected
#     all_gather  calls      3         2
#     broadcast   calls      1         0
#
# The counters are those of `lightning_shard.backends.traffic`: a ring's share, on every backend.


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected counters of one operation on a rank; a counter left None is not compared.

    Attributes:
        calls: Number of the rank's calls of the operation.
        elements: Number of elements that the rank sends, under the ring model of
            `backends.traffic`.
        bytes: Number of bytes that the rank sends, at the width of the type on the wire.
    """

    calls: int | None = None
    elements: int | None = None
    bytes: int | None = None


_NO_CALLS = Expected(calls=0)


@contextmanager
def assert_traffic(
    collectives: Collectives, *, allow: Collection[str] = (), **expected: Expected
) -> Iterator[None]:
    """Assert what this rank sends through `collectives` (and its duplicates) inside the block.

    Operations that are neither expected nor allowed must not be called. Works on every backend; an
    error in the block comes out as it is. Do not reset the counters inside.

    Args:
        collectives: Collectives of one group; each rank asserts its own counters.
        allow: Operations that may be called any number of times.
        **expected: Expected counters, by the operation's name.

    Raises:
        AssertionError: A counter differs; the message is a table of got and expected.
        ConfigError: No operation has such a name.
    """
    if unknown := sorted({*allow, *expected} - set(OPERATIONS)):
        raise ConfigError(
            f"assert_traffic: got {', '.join(unknown)}, expected names of operations: "
            f"{', '.join(OPERATIONS)}."
        )
    before = collectives.traffic.snapshot()
    yield
    after = collectives.traffic.snapshot()
    wrong = [
        row
        for operation in dict.fromkeys([*expected, *after])
        if operation in expected or operation not in allow
        for row in _misfits(
            operation,
            expected.get(operation, _NO_CALLS),
            before.get(operation, OperationTraffic()),
            after.get(operation, OperationTraffic()),
        )
    ]
    if wrong:
        raise AssertionError(
            f"Traffic on rank {collectives.rank} of {collectives.size}, group "
            f"{collectives.group.group_desc!r}, is not as expected.\n"
            + _table([("operation", "counter", "got", "expected"), *wrong])
        )


def _misfits(
    operation: str, expected: Expected, before: OperationTraffic, after: OperationTraffic
) -> Iterator[tuple[str, str, str, str]]:
    for counter in (field.name for field in fields(Expected)):
        wanted = getattr(expected, counter)
        got = getattr(after, counter) - getattr(before, counter)
        if wanted is not None and got != wanted:
            yield operation, counter, f"{got:,}", f"{wanted:,}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, two of words and two of numbers; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (str.ljust, str.ljust, str.rjust, str.rjust)
    lines = (zip(aligned, row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(align(cell, width) for align, cell, width in line) for line in lines)
