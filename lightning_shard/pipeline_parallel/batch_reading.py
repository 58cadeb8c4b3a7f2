"""How many samples a batch has, and which of its lists hold one value for each of them.

    [x, y]                         fields, as torch's collate function makes them
    (x, [boxes, boxes, ...])       fields, of which the second is a list of samples
    [ids, ids, ids, ...]           a list of samples
    [view, view] of equal shapes   either, where the loader does not tell

A tensor has as many rows as there are samples, a list as many values. Where these disagree, what
decides is how earlier lists of samples were read, then the loader's batch size, then what can be
read in one way only, then how the loader's earlier batches were read.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import (
    held_tensors,
    held_values,
    is_sequence,
    signature,
)

BatchLists = Literal["auto", "samples", "fields"]
_Path = tuple[Any, ...]


class BatchReader:
    """Reads the batches of one loader.

    Args:
        lists: What an ambiguous list or tuple is: one value for each sample, or fields, each of all
            samples. "auto" refuses what it cannot tell.
        loader_size: Samples that the loader takes for a batch; None where that is not known.
    """

    def __init__(self, lists: BatchLists = "auto", loader_size: int | None = None) -> None:
        self.lists, self._loader_size = lists, loader_size
        self._place: _Path | None = None  # whose size has been the number of samples

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch.

        Raises:
            ConfigError: No tensor has a dimension, one is packed, the number is ambiguous, or rows
                are of samples that an index names.
        """
        first = next(_tensors(batch)).size(0)
        if self.lists == "fields":
            return first
        sizes, places = _sizes(batch), dict(_places(batch, ()))
        size = self._told(batch, sizes, places)
        if self._place is None:
            _refuse_indexed(batch, size, self._loader_size)
            paths = (path for path, one in places.items() if one == size)
            place = next(paths)
            if place or not may_be_fields(batch, size, is_batch=True):  # else not sure
                self._place = place
        return size

    def _told(self, batch: Any, sizes: frozenset[int], places: dict[_Path, int]) -> int:
        if self._place == () and () in places:
            return places[()]  # a last batch's samples may have the loader's number of rows
        is_listed = self._place is None and self._loader_size in places.values()
        if self._loader_size is not None and (self._loader_size in sizes or is_listed):
            return self._loader_size
        if len(sizes) == 1:
            return next(iter(sizes))
        if self._place in places:
            return places[self._place]
        rows = next(_tensors(batch)).size(0)
        if isinstance(batch, tuple) and all(isinstance(one, Tensor) for one in batch):
            return rows  # collate functions make lists of samples of lists
        if self.lists == "samples":
            return len(batch) if is_sequence(batch) else max(sizes - {rows}, default=rows)
        raise _undecidable(batch, sizes)

    def holds_samples(self, values: Any, num_samples: int, *, is_batch: bool = False) -> bool:
        """Whether a list or tuple holds one value for each of a batch's samples."""
        if not is_sequence(values) or len(values) != num_samples:
            return False
        rows = [one.size(0) for one in held_tensors(values)]
        fields = may_be_fields(values, num_samples, is_batch=is_batch)
        if not rows or not (num_samples in rows or fields):
            return True
        if self.lists == "fields" or not are_alike(values):
            return False
        if (is_batch and self._place == ()) or not fields:
            return True
        if is_batch and isinstance(values, tuple):
            return False
        if self.lists == "auto":
            raise _undecidable(values, (num_samples,))
        return True

    def is_ragged(self, batch: Any, num_samples: int, *, is_batch: bool = True) -> bool:
        """Whether a list of samples, or a nested tensor, has other shapes for some of them."""
        is_nested = isinstance(batch, Tensor) and batch.is_nested
        if is_nested or self.holds_samples(batch, num_samples, is_batch=is_batch):
            samples = batch.unbind() if is_nested else batch
            return len({tuple(shape for shape, _ in signature(one)) for one in samples}) > 1
        held = (held_values(batch) or {}).values()
        return any(self.is_ragged(one, num_samples, is_batch=False) for one in held)


def may_be_fields(values: Any, num_samples: int, *, is_batch: bool = False) -> bool:
    """Whether each value has a row for each sample, or is a list that may be of them.

    A sample's own mapping is one of many in a list, but in a batch there may be two for all.
    """
    return all(_may_be_field(one, num_samples, is_batch=is_batch) for one in values)


def _may_be_field(value: Any, num_samples: int, *, is_batch: bool) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.size(0) == num_samples
    if is_sequence(value) and len(value):
        is_list = len(value) == num_samples and are_alike(value)
        return is_list or may_be_fields(value, num_samples, is_batch=is_batch)
    rows = {one.size(0) for one in held_tensors(value)}
    return is_batch and rows == {num_samples}


def _undecidable(batch: Any, sizes: Iterable[int]) -> ConfigError:
    return ConfigError(
        f"A {type(batch).__name__} of {len(held_values(batch) or ())} values in a batch can be "
        f"read as one value for each sample and as fields, each with a row for each sample "
        f"({' or '.join(map(str, sorted(sizes)))} samples). Set batch_lists='samples' or "
        f"batch_lists='fields', or let the loader's collate function make a dictionary, or one "
        f"tensor of all samples."
    )


def _sizes(value: Any) -> frozenset[int]:
    """Return the numbers of samples that a value can have; none where it does not tell."""
    if isinstance(value, Tensor):
        return frozenset([value.size(0)] if value.ndim else [])
    each = [sizes for one in (held_values(value) or {}).values() if (sizes := _sizes(one))]
    if each and is_sequence(value) and are_alike(value):
        return frozenset.intersection(*each) | {len(value)}
    return reduce(lambda found, one: found & one or found, each) if each else frozenset()


def _places(value: Any, path: _Path) -> Iterator[tuple[_Path, int]]:
    """Yield the sizes in a value: of tensors, and of lists of values that are alike."""
    if isinstance(value, Tensor) and value.ndim:
        yield path, value.size(0)
    if is_sequence(value) and len(value) and are_alike(value):
        yield path, len(value)
    for key, one in (held_values(value) or {}).items():
        yield from _places(one, (*path, key))


def are_alike(values: Any) -> bool:
    """Whether values may be samples of one dataset, of which some may lack theirs."""
    given = [_kind(one) for one in values if one is not None]
    return len(set(given)) == 1 and (len(given) > 1 or len(values) == 1)


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    return type(value), isinstance(value, tuple) and len(value)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch that have a dimension."""
    found = list(held_tensors(batch))
    if _has_packed(batch):
        raise ConfigError(
            "A PackedSequence cannot be split into microbatches: its samples are interleaved, "
            "expected them along a first dimension. Put the padded tensor and the lengths into "
            "the batch and call pack_padded_sequence in the model, or set num_microbatches=1."
        )
    if not found:
        raise ConfigError(
            f"A batch of type {type(batch).__name__} cannot be split into microbatches: got no "
            f"tensor with a dimension in it, expected the samples along the first dimension of "
            f"one. Let the collate function make tensors, in dictionaries, lists, tuples or "
            f"dataclasses, or leave batches whole with a pipeline's num_microbatches=1."
        )
    return iter(found)


def _has_packed(value: Any) -> bool:
    held = (held_values(value) or {}).values()
    return isinstance(value, PackedSequence) or any(map(_has_packed, held))


def _refuse_indexed(batch: Any, size: int, loader_size: int | None) -> None:
    """Raise where rows belong to samples by an index, as nodes do to graphs."""
    tensors = list(held_tensors(batch))
    counts = {one.size(0) for one in tensors} | {size, loader_size}
    for one in tensors:
        is_index = one.ndim == 1 and not (one.is_floating_point() or one.is_complex())
        if not is_index or one.dtype == torch.bool or len(one) < 2 or one[0] != 0:
            continue
        number = int(one[-1]) + 1
        is_sorted = bool((one[1:] >= one[:-1]).all())
        has_rows = any(other.size(0) == len(one) for other in tensors if other is not one)
        if is_sorted and number < len(one) and number in counts and has_rows:
            raise ConfigError(
                f"A batch has an index of {len(one)} rows into {number} samples, like the nodes of "
                f"graphs, and tensors of as many rows, which cannot be cut into microbatches of "
                f"whole samples; expected a row for each sample. Set num_microbatches=1, pad the "
                f"samples to one size, or use strategy='zero3'."
            )
