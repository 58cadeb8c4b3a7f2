"""Cutting a batch into microbatches, and merging their steps' results into one.

    batch of 10            4 microbatches            outputs            as if of one step
    {"x": (10, S)}   ──>   (3, S) (3, S) ...   ──>   loss, logits ──>   mean by size, (10, C)

What belongs to the samples is known by its size alone: a tensor whose first dimension is the batch
size is split, and so is a list of as many values. All else is passed whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.batch_reading import BatchReader, are_alike, may_be_fields
from lightning_shard.pipeline_parallel.containers import (
    held_tensors,
    held_values,
    is_sequence,
    with_values,
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
