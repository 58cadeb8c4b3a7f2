"""Cutting a batch into microbatches, and merging their steps' results into one.

    batch of 10            4 microbatches            outputs            as if of one step
    {"x": (10, S)}   ──>   (3, S) (3, S) ...   ──>   loss, logits ──>   mean by size, (10, C)

What belongs to the samples is known by its size alone: a tensor whose first dimension is the batch
size is split, and so is a list of as many values. All else is passed whole.

    [x, y], (x, [boxes, ...])      fields, of which the second may be a list of samples
    [ids, ids, ids, ...]           a list of samples
    [view, view] of equal shapes   either, where the loader does not tell

Where sizes disagree, what decides is how earlier lists of samples were read, then the loader's
batch size, then what can be read in one way only, then how its earlier batches were read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import (
    held_tensors,
    held_values,
    is_sequence,
    signature,
    with_values,
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


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Consecutive samples of a batch.

    Attributes:
        index: Number of the microbatch in the batch, from 0.
        content: The samples, in the batch's own type.
        weight: Number of samples divided by the batch's: the weight of its mean in the batch's.
    """

    index: int
    content: Any
    size: int
    weight: float


def batch_size_of(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch` that has one.

    Raises:
        ConfigError: There is no such tensor, or a packed sequence.
    """
    return BatchReader("fields").num_samples(batch)


def whole_batch(batch: Any) -> Microbatch:
    """Return a batch that is not cut, of any kind; logs count its samples as Lightning does."""
    try:
        size = batch_size_of(batch)
    except ConfigError:  # no tensor is found in it
        size = 1
    return Microbatch(index=0, content=batch, size=size, weight=1.0)


def split_batch(
    batch: Any, num_microbatches: int, reader: BatchReader | None = None
) -> list[Microbatch]:
    """Cut a batch of B samples into microbatches, the larger ones first.

    Tensors of B rows are split into views, lists and tuples of B values into parts. Everything else
    goes whole into every microbatch.

    Args:
        batch: Tensors in any nesting of mappings, lists, tuples and dataclasses.
        num_microbatches: Number of microbatches, at least 1.
        reader: Knows how the batch is to be read; by default from what it holds.

    Returns:
        Sizes as of `torch.tensor_split`: 10 samples in 4 are 3, 3, 2 and 2.

    Raises:
        ConfigError: Fewer samples than microbatches, no samples are found, or a list is ambiguous.
    """
    reader = reader or BatchReader()
    size = reader.num_samples(batch)
    if size < num_microbatches:
        raise ConfigError(
            f"A batch of {size} samples cannot be split into {num_microbatches} microbatches, "
            f"expected one sample for each at least. Use a batch size of {num_microbatches} or "
            f"more with DataLoader(drop_last=True), or num_microbatches={max(size, 1)}."
        )
    smaller, larger = divmod(size, num_microbatches)
    sizes = [smaller + (index < larger) for index in range(num_microbatches)]
    stops = accumulate(sizes)
    return [
        Microbatch(
            index=index,
            content=_samples(batch, size, slice(stop - part, stop), reader, is_batch=True),
            size=part,
            weight=part / size,
        )
        for index, (part, stop) in enumerate(zip(sizes, stops, strict=True))
    ]


def merge_outputs(outputs: list[Any], sizes: list[int]) -> Any:
    """Merge the microbatches' outputs into one, as if of one step; nothing raises.

    | what every microbatch returned                             | becomes                     |
    |------------------------------------------------------------|-----------------------------|
    | tensors with the microbatch's size, or one and the same    | concatenated                |
    | multiple of it (flattened tokens), as first dimension      |                             |
    | tensors of which only a later dimension has that size      | concatenated along it       |
    | tensors of differing first dimension, else of one shape    | concatenated                |
    | other tensors of one shape, scalars among them; numbers    | equal ones kept, else the   |
    |                                                            | mean by size                |
    | lists, tuples with one value per sample, unless all are    | concatenated                |
    | tensors of the microbatch's size                           |                             |
    | mappings of the same keys, dataclasses, other sequences of | merged value by value       |
    | one length                                                 |                             |
    | equal values, None                                         | kept                        |
    | anything else                                              | a list, one per microbatch  |
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes)
    if all(isinstance(output, np.ndarray) and output.dtype.kind in "biuf" for output in outputs):
        merged = _merge_tensors([torch.from_numpy(output) for output in outputs], sizes)
        return merged.numpy() if isinstance(merged, Tensor) else outputs
    if _are_samples(outputs, sizes):
        return type(first)(value for output in outputs for value in output)
    held = [held_values(output) or {} for output in outputs]
    same_type = all(type(output) is type(first) for output in outputs)
    if held[0] and same_type and all(values.keys() == held[0].keys() for values in held):
        merged = {key: merge_outputs([values[key] for values in held], sizes) for key in held[0]}
        return with_values(first, merged)
    return _merge_leaves(outputs, sizes)


def _samples(
    value: Any, batch_size: int, part: slice, reader: BatchReader, *, is_batch: bool = False
) -> Any:
    """Return the samples `part` of `value`, or `value` where it does not belong to samples."""
    if isinstance(value, Tensor | np.ndarray):
        return _rows(value, part) if value.ndim and _num_rows(value) == batch_size else value
    if reader.holds_samples(value, batch_size, is_batch=is_batch):
        return type(value)(value[part])
    held = held_values(value)
    if held is None:
        return value
    parts = {key: _samples(one, batch_size, part, reader) for key, one in held.items()}
    return with_values(value, parts)


def _num_rows(value: Any) -> int:
    return value.size(0) if isinstance(value, Tensor) else len(value)


def _rows(value: Any, part: slice) -> Any:
    """Return rows of a tensor or an array, a view where its layout has views."""
    if not isinstance(value, Tensor) or (value.layout == torch.strided and not value.is_nested):
        return value[part]
    if value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind()[part]), layout=value.layout)
    if not value.is_sparse:
        raise ConfigError(
            f"A batch has a tensor of the layout {value.layout}, which torch cannot cut into "
            f"microbatches; expected a dense, nested or COO tensor (to_sparse_coo()). Set "
            f"num_microbatches=1, or let the collate function make one."
        )
    return value.index_select(0, torch.arange(len(value), device=value.device)[part])


def _are_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    if not all(is_sequence(output) and type(output) is type(outputs[0]) for output in outputs):
        return False
    pairs = list(zip(outputs, sizes, strict=True))
    if all(len(output) == size for output, size in pairs):
        return all(_hold_samples(output, size) for output, size in pairs)
    return len({len(output) for output in outputs}) > 1


def _hold_samples(output: Any, size: int) -> bool:
    tensors = list(held_tensors(output))
    if not any(len(one) == size for one in tensors):
        return not tensors or are_alike(output)
    return are_alike(output) and not may_be_fields(output, size)


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    dim = _samples_dim([output.shape for output in outputs], sizes)
    return _merge_leaves(outputs, sizes) if dim is None else torch.cat(list(outputs), dim)


def _samples_dim(shapes: Sequence[torch.Size], sizes: Sequence[int]) -> int | None:
    """Return the dimension of samples, the second of (draws, samples, steps); None without one."""
    if not all(shapes):
        return None
    others = [{shape[:dim] + shape[dim + 1 :] for shape in shapes} for dim in range(len(shapes[0]))]
    fits = [dim for dim, rest in enumerate(others) if len(rest) == 1]
    later = [dim for dim in fits if dim and [shape[dim] for shape in shapes] == [*sizes]]
    multiples = {shape[0] / size for shape, size in zip(shapes, sizes, strict=True)}
    has_samples = len(multiples) == 1 and all(one > 0 and one.is_integer() for one in multiples)
    if later and not (has_samples and 0 in fits):
        return later[0]
    return 0 if 0 in fits and (has_samples or len(set(shapes)) > 1) else None


def _merge_leaves(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(_same(output, outputs[0]) for output in outputs):
        return outputs[0]
    if all(isinstance(output, int | float) for output in outputs):
        return sum(_weighted(outputs, sizes)) / sum(sizes)
    shapes = {output.shape if isinstance(output, Tensor) else None for output in outputs}
    if len(shapes) == 1 and None not in shapes:
        return _mean_tensor(outputs, sizes)
    return list(outputs)


def _same(left: Any, right: Any) -> bool:
    """Compare plain values and empty containers; values with tensors cannot be compared."""
    if left is right:
        return True
    is_plain = isinstance(left, str | int | float) or held_values(left) == {}
    return is_plain and type(left) is type(right) and bool(left == right)


def _mean_tensor(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the mean by size; added up in float32 at least, integers become floating point."""
    dtype = torch.promote_types(outputs[0].dtype, torch.float32)
    mean = sum(_weighted([output.to(dtype) for output in outputs], sizes)) / sum(sizes)
    assert isinstance(mean, Tensor)
    return mean.to(outputs[0].dtype) if outputs[0].is_floating_point() else mean


def _weighted(values: Iterable[Any], sizes: Sequence[int]) -> Iterator[Any]:
    return (value * size for value, size in zip(values, sizes, strict=True))
