"""How much a batch holds: samples, and tokens where it has some."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of

_IDS = "input_ids"  # of Hugging Face's batches


def num_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch; None where it cannot be told."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return None


def num_tokens(batch: Any, count: Callable[[Any], int] | None = None) -> int | None:
    """Return the number of tokens in a batch; None where it has none.

    Args:
        batch: A rank's batch.
        count: Counts the tokens; None takes the elements of `input_ids`, or else of the first
            tensor of whole numbers that has two dimensions, samples and positions.
    """
    if count is not None:
        return int(count(batch))
    if isinstance(batch, Mapping) and isinstance(batch.get(_IDS), Tensor):
        return int(batch[_IDS].numel())
    ids = (one for one in _tensors(batch) if one.ndim == 2 and _is_whole(one))
    return next((one.numel() for one in ids), None)


def _is_whole(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)
