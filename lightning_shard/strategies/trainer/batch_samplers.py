"""Gives loaders this rank's samples, and assigns a user's own batch sampler batch by batch.

    the user's      b0  b1  b2  b3  b4
    rank 0 of 2     b0      b2      b4
    rank 1 of 2         b1      b3      b0      ranks take the same steps; predictions repeat none
                                                unless ranks would have no other

The batches are those of one device. Lightning would make a batch sampler anew with a sampler for
each rank in place of the user's, or leave it out together with its batch size. All ranks assign
what rank 0 has drawn, so that one that draws at random gives each batch to one rank.

Of other loaders Lightning makes a new one with a sampler for each rank, by the arguments of the
user's constructor. Where it cannot (arguments by position, a subclass with a constructor of its
own) a copy of the user's loader gets that sampler.

The predictions of in-process ranks as one result, in the order of the data.

    rank 0      b0      b2      b4
    rank 1          b1      b3
    result      b0  b1  b2  b3  b4      as one device has it

Ranks that are given the same samples count once. Of loaders that nobody assigns to the ranks (a
stream, a sampler of one's own) batches come in turn, unless all ranks were given the same.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice, zip_longest
from sys import maxsize
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lightning_shard.elastic.elastic_sampler import (
    batches_asked_for,
    has_own_batches,
    replace_samplers,
)
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest
from lightning_shard.strategies.trainer._lightning import (
    assign_under_indices,
    is_assigned_by_trainer,
    noted_batches,
    prediction_loaders,
    preparing_dataloaders,
    sampler_of_rank,
    with_indices,
    without_samplers_of_ranks,
)

_OF_RANKS = ("num_replicas", "rank", "world_size")  # attributes of one that knows its rank


class AssignedBatches:
    """A rank's batches of a batch sampler with a length; by `repeats` all ranks have as many."""

    def __init__(
        self,
        batches: Any,
        place: Callable[[], dict[str, Any]],
        broadcast: Callable[[Any], Any],
        *,
        repeats: bool,
    ) -> None:
        self.batches = batches
        self._place = place
        self._broadcast = broadcast
        self._repeats = repeats

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self._numbers(len(self.batches)))

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterate over this rank's batches; each rank must call."""
        # One that goes on for ever ends where Lightning would stop to ask
        drawn = self._broadcast(list(islice(self.batches, len(self.batches))))
        return iter([drawn[number] for number in self._numbers(len(drawn))])

    def _numbers(self, num_batches: int) -> list[int]:
        place = self._place()
        ranks, rank = place["num_replicas"], place["rank"]
        if not self._repeats or num_batches == 0:
            return list(range(rank, num_batches, ranks))
        most = -(-num_batches // ranks)
        return [(turn * ranks + rank) % num_batches for turn in range(most)]


def assigns_batch_samplers(
    trainer: "pl.Trainer",
    place: Callable[[], dict[str, Any]],
    broadcast: Callable[[Any], Any],
    *,
    training: bool,
    predictions: bool = False,
    in_order: bool = False,
) -> AbstractContextManager[None]:
    """Assign a trainer's ranks the batches of the user's batch samplers inside.

    Where it is not `training`, its loader is copied as it is; in `predictions` ranks take whole
    batches of any loader; `in_order` several ranks, too, keep the order of one that does not
    shuffle. `place` returns `num_replicas` and `rank` of now; `broadcast` is collective.
    """

    def assign(batches: Any, *, repeats: bool) -> AssignedBatches:
        _check_length(batches)
        ranks = place()["num_replicas"]
        if type(batches) is BatchSampler and not repeats and len(batches) < ranks:
            size = max(1, len(batches.sampler) // ranks)  # type: ignore[arg-type]
            batches = BatchSampler(batches.sampler, size, drop_last=False)  # one for each rank
        repeats = repeats or (predictions and len(batches) < ranks)  # which are merged into one
        rank_zero_info(f"Rank r of N takes batches r, r + N ... of {type(batches).__name__}.")
        return AssignedBatches(batches, place, broadcast, repeats=repeats)

    def prepare_or_assign(
        prepare: Callable[..., Any], dataloader: Any, shuffle: bool, mode: RunningStage
    ) -> Any:
        own, sampler = (getattr(dataloader, one, None) for one in ("batch_sampler", "sampler"))
        in_place = own is None and isinstance(sampler, BatchSampler)  # of batches made elsewhere
        if mode == RunningStage.PREDICTING:
            has_batches = own is not None and (predictions or has_own_batches(dataloader))
        else:
            has_batches = in_place or has_own_batches(dataloader)
        if not (has_batches and is_assigned_by_trainer(trainer, dataloader)):
            keeps_order = isinstance(sampler, SequentialSampler)
            if keeps_order and (in_order or place()["num_replicas"] == 1):  # as on one device
                shuffle = False
            return _prepared(trainer, dataloader, partial(prepare, dataloader), shuffle, mode)
        if mode == RunningStage.PREDICTING:
            with without_samplers_of_ranks(trainer):
                return _assign_predictions(dataloader, partial(prepare, shuffle=shuffle), assign)
        loader, own = copy.copy(dataloader), sampler if in_place else own
        if (training or mode != RunningStage.TRAINING) and not _is_assigned(own):
            batches = assign(own, repeats=True)
            replace_samplers(loader, *((batches, None) if in_place else (sampler, batches)))
        return loader

    return preparing_dataloaders(trainer, prepare_or_assign)


def _prepared(
    trainer: "pl.Trainer",
    dataloader: Any,
    prepare: Callable[[bool, RunningStage], Any],
    shuffle: bool,
    mode: RunningStage,
) -> Any:
    """Return the loader that Lightning makes, or a copy where it cannot call the constructor."""
    try:
        return prepare(shuffle, mode)
    except (MisconfigurationException, TypeError):
        if not isinstance(dataloader, DataLoader):
            raise
    loader, batches = copy.copy(dataloader), dataloader.batch_sampler
    if isinstance(dataloader.dataset, IterableDataset):
        return loader
    sampler: Any = dataloader.sampler
    if not has_own_batches(dataloader):
        sampler = sampler_of_rank(trainer, dataloader, shuffle=shuffle, mode=mode)
        batches = None if batches is None else _batches_of(dataloader, sampler, mode)
    if mode == RunningStage.PREDICTING and batches is not None:
        batches = with_indices(batches)  # type: ignore[arg-type]
    replace_samplers(loader, sampler, batches)
    return loader


def _batches_of(dataloader: DataLoader[Any], sampler: Any, mode: RunningStage) -> BatchSampler:
    size, drop_last = batches_asked_for(dataloader)
    return BatchSampler(sampler, size, drop_last and mode != RunningStage.PREDICTING)


def _assign_predictions(
    dataloader: Any, prepare: Callable[..., Any], assign: Callable[..., Any]
) -> Any:
    """Assign the batches that Lightning predicts on one device, whose indices it notes."""
    try:
        loader = prepare(dataloader, mode=RunningStage.PREDICTING)
    except (MisconfigurationException, TypeError):  # not even one device's can be made anew
        loader, batches = copy.copy(dataloader), dataloader.batch_sampler
        if type(batches) is BatchSampler:  # predictions leave no sample out
            batches = BatchSampler(batches.sampler, batches.batch_size, drop_last=False)
        replace_samplers(loader, loader.sampler, with_indices(assign(batches, repeats=False)))
        return loader
    assign_under_indices(loader.batch_sampler, _knows_ranks, partial(assign, repeats=False))
    return loader


def _is_assigned(batches: Any) -> bool:
    """Whether the user's sampler of ranks assigns the samples."""
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        return True
    if _knows_ranks(batches):
        raise ConfigError(
            f"The batch sampler {type(batches).__name__} knows the ranks itself, and the Trainer "
            f"would assign its batches to them once more. Pass "
            f"Trainer(use_distributed_sampler=False), or let it yield the batches of all ranks."
        )
    return False


def _knows_ranks(batches: Any) -> bool:
    return any(hasattr(batches, name) for name in _OF_RANKS)


def _check_length(batches: Any) -> None:
    try:
        len(batches)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"The batch sampler {type(batches).__name__} has no length, expected one: an epoch's "
            "batches are assigned to the ranks together. Give it, and the sampler in it, a "
            "__len__, or pass Trainer(use_distributed_sampler=False) and let it yield this rank's "
            "batches."
        ) from error


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
