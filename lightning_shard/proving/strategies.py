"""What is asked of a strategy: to run in this process, its ranks' places, full gradients."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor

from lightning_shard.data_parallel.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.sharded_tensor import ShardedTensor
from lightning_shard.errors import ConfigError
from lightning_shard.schemes import SCHEMES, named_schemes, names_of
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.names import strategy_name

StrategyLike = str | Strategy | Callable[[], Strategy]
_BACKEND = "in_process"
# Weights and optimizer state are compared in full on rank 0, however the run would save them.
_WHOLE_STATE = {"checkpoint_format": "full", "save_trainable_only": False, "async_save": False}
_BY_STAGE = ("shard_ddp", "zero1", "zero2", "zero3")


def strategy_in_process(
    given: StrategyLike, num_ranks: int, *, asked_by: str = "prove"
) -> ShardStrategy:
    """Return a new strategy of the same options whose ranks run inside this process.

    Args:
        given: The strategy's name, itself, or what makes it.
        num_ranks: Ranks inside this process.
        asked_by: Who asks, for the message.

    Raises:
        ConfigError: The strategy is not one of this package.
    """
    made = _made(given)
    if not isinstance(made, ShardStrategy):
        raise ConfigError(
            f"{asked_by} got the strategy {given!r}, expected one of this package, whose ranks can "
            f"run inside this process: {', '.join(SCHEMES)}. In the place of Lightning's 'ddp' "
            f"take 'shard_ddp', in that of 'fsdp' or 'deepspeed' take 'zero3'."
        )
    return made.in_process(num_ranks, **_WHOLE_STATE)


def _made(given: StrategyLike) -> Any:
    if not isinstance(given, str):
        return given if isinstance(given, Strategy) else given()
    for scheme in named_schemes():
        names = names_of(scheme.name)
        if given in dict(names):
            return StrategyRegistry.get(next(name for name, one in names if one == _BACKEND))
    return None


def place_in_data(strategy: Strategy) -> tuple[int, int]:
    """Return a rank's number among those of different samples, and how many there are."""
    if not isinstance(strategy, ShardStrategy):
        return 0, 1
    return strategy.data_collectives.rank, strategy.data_collectives.size


def full_gradients(module: "pl.LightningModule") -> list[tuple[str, Tensor]]:
    """Return the full gradient of each parameter that has one; each rank must call."""
    engine = getattr(module.trainer.strategy, "engine", None)
    full = list[tuple[str, Tensor]]()
    for name, param in module.named_parameters():
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, AveragedGradient | ShardedTensor):
            grad = grad.full_tensor()
        elif engine is not None and engine.split.is_spread(param):
            with torch.no_grad():
                grad = engine.split.full(param, grad)
        full.append((name, grad))
    return full


def name_of(strategy: ShardStrategy) -> str:
    """Return the name of a strategy, without a backend."""
    return strategy_name(strategy)


def check_comparable(strategy: ShardStrategy) -> None:
    """Raise if a strategy trains otherwise than one device by what it is.

    Raises:
        ConfigError: Naming the strategy that can be proved in its place.
    """
    name = strategy_name(strategy)
    by_design = {"local_sgd": "ranks train alone between exchanges", "async_sgd": "gradients lag"}
    why = by_design.get(name)
    if why is None and getattr(strategy, "compression", None) is not None:
        why = "what ranks exchange is compressed"
    if why is not None:
        raise ConfigError(
            f"prove compares with one device, from which {name!r} differs by design: {why}. Prove "
            f"the module under 'shard_ddp', which has the same ranks and the same batches."
        )


def for_replay(strategy: ShardStrategy, num_ranks: int) -> ShardStrategy:
    """Return a strategy that takes recorded batches: an elastic one assigns samples itself."""
    if isinstance(strategy, ElasticStrategy):
        return strategy_in_process(_BY_STAGE[strategy.stage], num_ranks)
    return strategy
