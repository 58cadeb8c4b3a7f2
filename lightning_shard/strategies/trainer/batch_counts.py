"""Checks that ranks take the same number of steps, before training or batch by batch.

A rank that runs out of data while the others go on would leave them waiting for ever. Loaders
that know their length are compared once; streams are asked before every batch.

Checks by digests that ranks which share every layer are given the same batch.

Parts of layers that work on different samples silently give wrong results, and ranks with batches
of different shapes wait for each other for ever. So each rank digests its batch before it is used,
and the ranks of the group compare: the batches 0, 1, 2, 4, 8 ... of each loader, which finds a
wrong sampler at once and a rare difference in the end, at a cost that soon is nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest


def lengths_on_ranks(loader: Any, collectives: Collectives) -> list[int | None]:
    """Return each rank's number of batches, None for a stream. Each rank must call."""
    return collectives.all_gather_object(_length(loader))


def agree_on_batches(
    loader: Any,
    answers: list[int | None],
    collectives: Collectives,
    device: torch.device,
    *,
    is_training: bool = False,
) -> Any:
    """Compare a loader's length over the ranks; wrap a loader without a length.

    Args:
        loader: This rank's loader.
        answers: Lengths on the ranks, as `lengths_on_ranks` returns them.
        collectives: Group of the ranks that must take the same steps.
        device: Where the messages about streams lie.
        is_training: Whether a stream without a batch is warned of; Lightning warns of lengths of 0.

    Raises:
        ConfigError: The lengths differ; raised on every rank.
    """
    lengths = [length for length in answers if length is not None]
    if len(lengths) < len(answers):
        if collectives.size == 1:
            return loader
        return AgreedBatches(loader, collectives, device, is_training=is_training)
    if len(set(lengths)) > 1:
        shortest = lengths.index(min(lengths))
        raise ConfigError(
            f"Rank {collectives.rank}: the ranks have different numbers of batches, "
            f"{dict(enumerate(lengths))}; rank {shortest} has {lengths[shortest]}, expected the "
            f"same on all. Give every rank the same dataset and let the Trainer's sampler split "
            f"it, or drop the surplus in your own sampler."
        )
    return loader


def check_same_lengths(loader: Any, collectives: Collectives) -> None:
    """Raise unless ranks that share the work on each batch have the same number of them.

    Args:
        loader: This rank's loader.
        collectives: Group of the ranks that share the work; each must call.

    Raises:
        ConfigError: The lengths differ; raised on every rank.
    """
    lengths = lengths_on_ranks(loader, collectives)
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Rank {collectives.rank} of its tensor-parallel group: the ranks that share every "
            f"layer have different numbers of batches, {dict(enumerate(lengths))}, expected the "
            f"same. Give them the same dataset and let the Trainer's sampler split it."
        )


def _length(loader: Any) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream
        return None


class AgreedBatches:
    """A loader of unknown length whose ranks agree before each batch that all have one.

    Args:
        loader: Any iterable of batches.
        collectives: Group of the ranks that must take the same steps.
        device: Where the one-element message lies.
        is_training: Whether a stream without a batch on any rank is warned of.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        collectives: Collectives,
        device: torch.device,
        *,
        is_training: bool = False,
    ) -> None:
        self._loader = loader
        self._collectives = collectives
        self._device = device
        self._is_training = is_training

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        index = -1
        for index, batch in enumerate(self._loader):
            self._agree(index, has_batch=True)
            yield batch
        self._agree(index=None, has_batch=False)
        if index < 0 and self._is_training:
            rank_zero_warn(
                "The stream of data yielded no batch on any rank, so that this epoch trains "
                "nothing. Is it exhausted, or its source empty?"
            )

    def _agree(self, index: int | None, *, has_batch: bool) -> None:
        counts = torch.tensor([int(has_batch)], device=self._device)
        self._collectives.all_reduce(counts).wait()
        total = int(counts)
        if total not in (0, self._collectives.size):
            mine = f"has batch {index}" if has_batch else "has run out of data"
            raise ConfigError(
                f"Rank {self._collectives.rank} {mine}, but only {total} of "
                f"{self._collectives.size} ranks have one more batch. Every rank must yield the "
                f"same number: shard the stream by rank and cut it to equal lengths."
            )


class SameBatches:
    """Compares the batches of the ranks of a tensor-parallel group.

    Args:
        group: Group of the tensor-parallel ranks.
        ranks: Global rank of each of the group's ranks.
        device: Where the message lies.
    """

    def __init__(self, group: Collectives, ranks: tuple[int, ...], device: torch.device) -> None:
        self._group = group
        self._ranks = ranks
        self._device = device
        self._seen: Counter[str] = Counter()

    def check(self, batch: Any, loader: str) -> None:
        """Take the next batch of a loader; each rank of the group must call.

        Args:
            batch: Tensors, arrays, texts and numbers in any containers; others are not compared.
            loader: Name of the loader that the batch comes from.

        Raises:
            ConfigError: The batches differ; raised on every rank.
        """
        index = self._seen[loader]
        self._seen[loader] += 1
        if index & (index - 1):
            return
        own = torch.tensor([digest(batch)], device=self._device)
        all_digests = own.new_empty(self._group.size)
        self._group.all_gather(all_digests, own).wait()
        digests = all_digests.tolist()
        strangers = [
            str(rank)
            for rank, other in zip(self._ranks, digests, strict=True)
            if other != digests[0]
        ]
        if strangers:
            raise ConfigError(
                f"Rank {self._ranks[self._group.rank]}: the ranks "
                f"{', '.join(map(str, self._ranks))} share every layer and must be given the same "
                f"batches, but batch {index} of {loader} on rank {', '.join(strangers)} is not "
                f"that of rank {self._ranks[0]}. Leave the sampler to the Trainer, or make your "
                f"own from trainer.distributed_sampler_kwargs and one seed; where samples are "
                f"changed at random, call seed_everything(seed, workers=True)."
            )
