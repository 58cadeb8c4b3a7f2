"""A batch sampler of the user's own is dealt to the ranks, batch by batch.

    the user's      b0  b1  b2  b3  b4
    rank 0 of 2     b0      b2      b4
    rank 1 of 2         b1      b3      b0      ranks take the same steps; predictions repeat none

Lightning makes a batch sampler anew with a sampler for each rank, which it can do only for classes
that are constructed as torch's own is, and refuses all others. Those are dealt here. All ranks deal
what rank 0 has drawn, so that one that draws at random gives each batch to one rank.
"""

import copy
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_shard.strategies._lightning import prepare_dataloader
from lightning_shard.strategies.replaced import replaced

_OF_RANKS = ("num_replicas", "rank", "world_size")  # attributes of one that knows its rank


class DealtBatches:
    """A rank's batches of a batch sampler.

    Args:
        batches: The user's batch sampler, of some length.
        place: Returns `num_replicas` and `rank` of this rank now.
        broadcast: Gives every rank what rank 0 has; each rank must call.
        repeats: Whether some come twice, so that all ranks have the same number.
    """

    def __init__(
        self,
        batches: Any,
        place: Callable[[], dict[str, Any]],
        broadcast: Callable[[Any], Any],
        *,
        repeats: bool,
    ) -> None:
        self._batches = batches
        self._place = place
        self._broadcast = broadcast
        self._repeats = repeats

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._numbers(len(self._batches)))

    def __iter__(self) -> Iterator[list[Any]]:
        """Each rank must call."""
        drawn = self._broadcast(list(self._batches))
        return iter([drawn[number] for number in self._numbers(len(drawn))])

    def _numbers(self, num_batches: int) -> list[int]:
        place = self._place()
        ranks, rank = place["num_replicas"], place["rank"]
        if not self._repeats or num_batches == 0:
            return list(range(rank, num_batches, ranks))
        most = -(-num_batches // ranks)
        return [(turn * ranks + rank) % num_batches for turn in range(most)]


@contextmanager
def deals_batch_samplers(
    trainer: "pl.Trainer", place: Callable[[], dict[str, Any]], broadcast: Callable[[Any], Any]
) -> Iterator[None]:
    """Inside, a trainer takes loaders whose batch samplers Lightning cannot make anew.

    Args:
        trainer: Of a run.
        place: See `DealtBatches`.
        broadcast: See `DealtBatches`.
    """
    connector, name, prepare = prepare_dataloader(trainer)

    def prepare_or_deal(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        try:
            return prepare(dataloader, shuffle, mode)
        except TypeError:
            if not _can_be_dealt(dataloader):
                raise
        rank_zero_info(
            f"Rank r of N takes batches r, r + N ... of {type(dataloader.batch_sampler).__name__}. "
            f"If it knows the ranks itself, pass Trainer(use_distributed_sampler=False)."
        )
        repeats = mode != RunningStage.PREDICTING
        dealt = DealtBatches(dataloader.batch_sampler, place, broadcast, repeats=repeats)
        loader = copy.copy(dataloader)
        vars(loader)["batch_sampler"] = dealt  # torch refuses to set it
        return loader

    with replaced(connector, name, prepare_or_deal):
        yield


def _can_be_dealt(dataloader: Any) -> bool:
    if not isinstance(dataloader, DataLoader):
        return False
    own = dataloader.batch_sampler
    knows_ranks = any(hasattr(own, name) for name in _OF_RANKS)
    if knows_ranks or isinstance(getattr(own, "sampler", None), DistributedSampler):
        return False
    return isinstance(own, Sized) and type(own) is not BatchSampler
