"""Mistakes that are planted into the package, to show that programs find them.

Each is of a kind that has been found in such a package before: it raises nothing, and trains on.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.buffers import BufferSync
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.optim import clipping
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.strategies.data_parallel import DataParallelStrategy

MISTAKES: dict[str, Callable[[], None]] = {}


def mistake(plant: Callable[[], None]) -> Callable[[], None]:
    """Register a mistake under its function's name."""
    MISTAKES[plant.__name__] = plant
    return plant


def plant(name: str) -> None:
    """Make a mistake in this process, for good."""
    MISTAKES[name]()


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    kept = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return wrapper(kept, *args, **kwargs)

    setattr(owner, name, changed)


@mistake
def gradients_are_summed() -> None:
    """Averages are sums."""
    for name in ("all_reduce", "reduce_scatter"):

        def summed(kept: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("op") == "avg":
                kwargs["op"] = "sum"
            return kept(*("sum" if value == "avg" else value for value in args), **kwargs)

        _wrap(Collectives, name, summed)


@mistake
def parameters_go_stale() -> None:
    """Of every three updates the last one is not sent to the other ranks."""
    counts: Counter[int] = Counter()

    def sometimes(kept: Any, engine: Any, params: Any) -> Any:
        counts[id(engine)] += 1
        return None if counts[id(engine)] % 3 == 0 else kept(engine, params)

    _wrap(DataParallelEngine, "publish", sometimes)


@mistake
def absent_gradients_are_zeros() -> None:
    """A parameter that nothing used is stepped with a gradient of zeros."""

    def filled(kept: Any, optimizer: Any) -> Any:
        for param in optimizer.params:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        return kept(optimizer)

    _wrap(ShardedOptimizer, "_enter", filled)


@mistake
def clipping_by_a_local_norm() -> None:
    """Each rank clips by the norm of its own shards."""
    _wrap(clipping, "shards_over", lambda kept, *args: [])


@mistake
def buffers_are_overwritten() -> None:
    """Running statistics are halved where ranks take them over."""

    def halved(kept: Any, sync: Any, buffers: Any) -> Any:
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.mul_(0.5)
        return kept(sync, buffers)

    _wrap(BufferSync, "_broadcast", halved)


@mistake
def samples_of_rank_0() -> None:
    """Every rank is given the samples of rank 0."""
    kept = DataParallelStrategy.distributed_sampler_kwargs.fget
    assert kept is not None
    DataParallelStrategy.distributed_sampler_kwargs = property(
        lambda self: kept(self) | {"rank": 0}
    )


@mistake
def states_are_not_resumed() -> None:
    """Optimizers begin anew where a run is resumed."""
    DataParallelStrategy.load_optimizer_state_dict = lambda *_: None
