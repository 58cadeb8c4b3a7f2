"""What is asked of a strategy: to run in this process, its ranks' places, full gradients."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor

from lightning_shard.checkpoint.random_state import load_random_state, random_state
from lightning_shard.core.extensions import instead
from lightning_shard.core.schemes import BY_STAGE, SCHEMES, named_schemes, names_of
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.async_sgd import AsyncSGDStrategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.local_sgd import LocalSGDStrategy
from lightning_shard.strategies.names import strategy_name

StrategyLike = str | Strategy | Callable[[], Strategy]
_BACKEND = "in_process"
# Weights and optimizer state are compared in full on rank 0, however the run would save them.
_WHOLE_STATE = {"checkpoint_format": "full", "save_trainable_only": False, "async_save": False}
# More steps than any proof takes, so that the ranks never meet.
_NO_EXCHANGE = {
    "sync_every": 1 << 30,
    "warmup_steps": 0,
    "fragments": 1,
    "overlap_steps": 0,
    "mixing": 0.0,
}


def strategy_in_process(
    given: StrategyLike, num_ranks: int, *, asked_by: str = "prove", **changed: Any
) -> DataParallelStrategy:
    """Return a new strategy of the same options whose ranks run inside this process.

    `changed` are options that it is to have in the place of its own.

    Raises:
        ConfigError: The strategy is not one of this package; the message names `asked_by`.
    """
    made = _made(given)
    if not isinstance(made, DataParallelStrategy):
        raise ConfigError(
            f"{asked_by} got the strategy {given!r}, expected one of this package, whose ranks can "
            f"run inside this process: {', '.join(SCHEMES)}. In the place of Lightning's 'ddp' "
            f"take 'shard_ddp', in that of 'fsdp' or 'deepspeed' take 'zero3'."
        )
    return made.in_process(num_ranks, **_WHOLE_STATE, **changed)


def _made(given: StrategyLike) -> Any:
    if not isinstance(given, str):
        return given if isinstance(given, Strategy) else given()
    for scheme in named_schemes():
        names = names_of(scheme.name)
        if given in dict(names):
            return StrategyRegistry.get(next(name for name, one in names if one == _BACKEND))
    return None


def trains_by_itself(strategy: Strategy) -> bool:
    """Whether each rank has weights of its own now, and what is asked of all is their mean."""
    return isinstance(strategy, LocalSGDStrategy) and strategy.engine.is_alone


def places(strategy: Strategy) -> tuple[int, int, int]:
    """Return a rank's number among all and among those of other samples, and how many these are."""
    if not isinstance(strategy, DataParallelStrategy):
        return 0, 0, 1
    return strategy.mesh_rank, strategy.data_collectives.rank, strategy.data_collectives.size


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


def comparable(given: StrategyLike, num_ranks: int) -> tuple[StrategyLike, str, bool]:
    """Return what is compared in a strategy's place, where it differs from one device by design."""
    made = strategy_in_process(given, num_ranks)
    name, told = strategy_name(made), list[str]()
    changed: dict[str, Any] = {}
    if getattr(made, "compression", None) is not None:
        changed["compression"] = None
        told.append("without compression, which changes what ranks exchange and no rank's step")
    if isinstance(made, AsyncSGDStrategy):
        changed["staleness_bound"] = 0
        told.append("with staleness_bound=0, without which gradients are those of earlier weights")
    is_local = isinstance(made, LocalSGDStrategy)
    if is_local:
        changed |= _NO_EXCHANGE
        told.append("each rank with one device on its own samples, between two exchanges")
    if not changed:
        return given, "", False
    remark = f"{name!r} differs from one device by design; it was compared {', '.join(told)}"
    return partial(strategy_in_process, made, num_ranks, **changed), remark, is_local


def for_replay(strategy: DataParallelStrategy, num_ranks: int) -> DataParallelStrategy:
    """Return a strategy that takes recorded batches: an elastic one assigns samples itself."""
    if isinstance(strategy, ElasticStrategy):
        return strategy_in_process(BY_STAGE[strategy.stage], num_ranks)
    return strategy


# Runs that the caller's own code need not notice, but for what they take: a dozen in a proof.

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")

QUIET_OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Of the Trainer of such a run."""


def batches_seen(trainer: "pl.Trainer", see: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Call `see` with each batch: the precision plugin is the first that is given one."""

    def seen(convert: Callable[[Any], Any], batch: Any) -> Any:
        see(batch)
        return convert(batch)

    return instead(trainer.precision_plugin, "convert_input", seen)


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged but errors, nobody be warned, and the caller's random streams stay."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    streams = random_state(torch.device("cpu"))
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        load_random_state(streams, torch.device("cpu"))
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
