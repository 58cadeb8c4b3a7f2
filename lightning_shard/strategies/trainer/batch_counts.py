"""Checks that ranks take the same number of steps, before training or batch by batch.

A rank that runs out of data while the others go on would leave them waiting for ever. Loaders
that know their length are compared once; streams are asked before every batch.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError


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
    """Compare a loader's length over the ranks, by their answers; wrap a loader without a length.

    In training a stream without a batch is warned of; Lightning warns of lengths of 0.
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
    """Raise unless ranks that share the work on each batch have the same number of them."""
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
    """A loader of unknown length whose ranks agree before each batch that all have one."""

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
