"""One value of all ranks for what is logged, so that what decides by it decides alike.

    an epoch's end    rank 0  val  .5 of 8 samples  ─┐   matched by name, with sync_dist or without:
                      rank 1  val  .7 of 4 samples  ─┴─> .5667 on every rank, as one device has it
    in steps          what a scheduler or a checkpoint monitors: the mean, when they ask for it

Loggers, progress bars and `trainer.callback_metrics` have it as well. What is reduced in steps, by
`self.log(..., on_step=True, sync_dist=True)`, goes by the order of calls: at an epoch's end ranks
compare which names they have logged so.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_shard.data_parallel.agreement import met
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer._lightning import (
    EpochValue,
    epoch_values,
    is_within_epoch,
    sharing_values,
    take_epoch_value,
)


@contextmanager
def common_values(trainer: "pl.Trainer", strategy: Any) -> Iterator[None]:
    """Give ranks one value of each name that they log inside, and compare their settings.

    Args:
        trainer: The Trainer of a run.
        strategy: Its strategy, whose `data_collectives` are the ranks that have other samples.
    """

    def at_epoch_end() -> None:
        of_all = met(epoch_values(trainer), strategy.data_collectives, "an epoch's values")
        _check_steps(of_all, strategy.global_rank)
        for key, found in _by_name(of_all):
            take_epoch_value(trainer, key, found[0].names, _combined(found))
        strategy.check_settings(trainer)

    def mean(values: Mapping[str, Any]) -> Mapping[str, Any]:
        if trainer.state.status != TrainerStatus.RUNNING:  # others may be elsewhere
            return values
        if is_within_epoch(trainer) and not strategy.meets_at_steps:
            return values
        numbers = {key: float(one) for key, one in values.items() if _is_number(one)}
        of_all = met(numbers, strategy.data_collectives, "what is monitored")
        means = {key: sum(each) / len(each) for key, each in _by_name(of_all)}
        return {**values, **{key: _like(values.get(key), one) for key, one in means.items()}}

    with sharing_values(trainer, at_epoch_end, mean):
        yield


def _like(own: Any, mean: float) -> Tensor:
    """Return a mean in the format of this rank's own value, as callbacks compare and save it."""
    return torch.tensor(mean, dtype=own.dtype if isinstance(own, Tensor) else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _by_name(of_all: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name with the values of the ranks that have one, in the same order on all."""
    for key in dict.fromkeys(key for one in of_all for key in one):
        yield key, [one[key] for one in of_all if key in one]


def _combined(found: Sequence[EpochValue]) -> float:
    totals, count = [one.total for one in found], sum(one.weight for one in found)
    reduce = {"max": max, "min": min}.get(found[0].reduction, sum)
    total = reduce(totals)
    return total if found[0].reduction != "mean" else total / count if count else float("nan")


def _check_steps(of_all: Sequence[Mapping[str, EpochValue]], rank: int) -> None:
    told = [
        {one.names[0]: one.in_steps for one in each.values() if one.in_steps} for each in of_all
    ]
    if other := next((at for at, one in enumerate(told) if one != told[0]), 0):
        raise ConfigError(
            f"Rank {rank}: what is logged in steps with sync_dist=True is averaged in the order of "
            f"the calls, expected the same names as often on all ranks, or different names mix up: "
            f"by name and times, of the ranks with other samples the first has logged {told[0]} in "
            f"this epoch and number {other} {told[other]}. Log each name on every rank, or with "
            f"on_step=False, on_epoch=True, which goes by name."
        )
