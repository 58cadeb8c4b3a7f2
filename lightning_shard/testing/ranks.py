"""Run a function on several ranks in this process; for tests, notebooks and debugging."""

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.backends.in_process import Fault, InProcessBackend, World, injected_faults
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
            rank=rank,
            world_size=num_ranks,
            device=torch.device("cpu"),
            timeout=DEFAULT_TIMEOUT,
        )
        return fn(rank)

    return world.run(begin)


def make_world(num_ranks: int, seed: int, faults: Iterable[Fault]) -> World:
    """Make the world that `run_ranks` runs in.

    Raises:
        ConfigError: An argument is wrong.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"run_ranks: got seed={seed!r}, expected an integer.")
    world = World(num_ranks, faults)
    if not 0 <= seed <= _MAX_SEED - num_ranks:
        raise ConfigError(
            f"run_ranks: got seed={seed}, expected 0 to {_MAX_SEED - num_ranks}, so that "
            "seed + rank is a seed for numpy too."
        )
    return world
