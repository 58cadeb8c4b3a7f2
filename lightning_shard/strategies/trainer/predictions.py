"""The predictions of in-process ranks as one result, in the order of the data.

    rank 0      b0      b2      b4
    rank 1          b1      b3
    result      b0  b1  b2  b3  b4      as one device has it

Ranks that are given the same samples count once. Of loaders that nobody assigns to the ranks (a
stream, a sampler of one's own) batches come in turn, unless all ranks were given the same.
"""

from collections.abc import Sequence
from itertools import zip_longest
from sys import maxsize
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DistributedSampler

from lightning_shard.pipeline_parallel.containers import digest
from lightning_shard.strategies.trainer._lightning import noted_batches, prediction_loaders
from lightning_shard.strategies.trainer.batch_samplers import AssignedBatches

_NOTHING = object()


class PredictedBatches:
    """What one rank was given to predict."""

    def __init__(self, trainer: "pl.Trainer", rank: int) -> None:
        self.rank = rank
        self.totals = [_num_assigned(one) for one in prediction_loaders(trainer)]
        self.digests: list[list[int] | None] = [[] if one is None else None for one in self.totals]

    def note(self, batch: Any, *numbers: int) -> None:
        """Take down the next batch of a loader that nobody assigns."""
        digests = self.digests[numbers[-1] if len(self.digests) > 1 else 0]
        if digests is not None:
            digests.append(digest(batch))


def _num_assigned(loader: Any) -> int | None:
    """Return how many batches all ranks have at most; None where nobody assigns them any."""
    batches = noted_batches(getattr(loader, "batch_sampler", None))
    if isinstance(batches, AssignedBatches):
        return len(batches.batches)
    samplers = [getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
    return maxsize if any(isinstance(one, DistributedSampler) for one in samplers) else None


def merged(results: Sequence[Any], trainers: Sequence["pl.Trainer | None"]) -> Any:
    """Return rank 0's result, of predictions that of all ranks."""
    first = trainers[0]
    if first is None or first.state.fn != TrainerFn.PREDICTING or not isinstance(results[0], list):
        return results[0]
    shares: dict[int, Any] = {}  # by rank of other samples
    for result, trainer in zip(results, trainers, strict=True):
        strategy: Any = None if trainer is None else trainer.strategy
        shares.setdefault(strategy.predicted.rank, (result, strategy.predicted))
    of_all = [shares[rank] for rank in sorted(shares)]
    totals = of_all[0][1].totals
    is_only = len(totals) == 1  # then the result is that of the only loader
    for number, loader in enumerate(results[:1] if is_only else results[0]):
        mine = [one if is_only else one[number] for one, _ in of_all]
        digests = [given.digests[number] for _, given in of_all]
        loader[:] = _in_turn(mine, digests)[: totals[number]]  # those of which ranks had none twice
    return results[0]


def _in_turn(of_all: Sequence[list[Any]], digests: Sequence[list[int] | None]) -> list[Any]:
    if digests[0] and all(one == digests[0] for one in digests):
        return [*of_all[0]]  # nobody has assigned the samples: all ranks have predicted them all
    turns = zip_longest(*of_all, fillvalue=_NOTHING)
    return [one for turn in turns for one in turn if one is not _NOTHING]
