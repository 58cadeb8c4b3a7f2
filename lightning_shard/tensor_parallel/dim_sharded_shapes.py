"""Rules of operations on shapes, which may move the sharded dimension of a `DimShardedTensor`.

    (B, T, C)   sharded along C      view(B, T, heads, C / heads)   sharded along the heads
    (B, T, 3C)  q, k, v: 3 blocks     split(C, -1)                   each sharded, 1 block
    (B, H, T, W) sharded along H     view(B * H, T, W)              B blocks along the first

A rule moves no elements between ranks: where the result's parts would be others, it declines.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part

Reshape = Callable[[Tensor, Sequence[int]], Tensor]


def view(func: Any, sharded: Any, *shape: Any, **kwargs: Any) -> Any:
    """Rule of view and reshape."""
    sizes = _listed(shape)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    return _reshaped(func, sharded, sizes)


def flatten(func: Any, sharded: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Make one dimension of several."""
    first, last = start_dim % sharded.ndim, end_dim % sharded.ndim
    shape = list(sharded.shape)
    shape[first : last + 1] = [math.prod(shape[first : last + 1])]
    return _reshaped(torch.reshape, sharded, shape)


def unflatten(func: Any, sharded: Any, dim: int, sizes: Any) -> Any:
    """Make several dimensions of one."""
    if not isinstance(dim, int) or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    shape = list(sharded.shape)
    shape[dim % sharded.ndim : dim % sharded.ndim + 1] = sizes
    return _reshaped(torch.reshape, sharded, shape)


def _reshaped(reshape: Reshape, sharded: DimShardedTensor, sizes: list[int]) -> Any:
    part, num_values = sharded.part, sharded.numel()
    if -1 in sizes:
        rest = -math.prod(sizes)
        if rest <= 0:
            return NotImplemented
        sizes[sizes.index(-1)] = num_values // rest
    found = _place_in(sharded, sizes) if math.prod(sizes) == num_values > 0 else None
    if found is None:
        return NotImplemented
    dim, num_blocks, own_length = found
    sizes[dim] = num_blocks * own_length
    return part.widen(reshape(part.local, sizes), dim, num_blocks)


def _place_in(sharded: DimShardedTensor, sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the sharded dimension of another shape, its blocks, and what a rank has of each."""
    # In row-major order there are `num_runs` runs of values, of each of which the ranks have
    # consecutive parts. A dimension has the same runs if its blocks begin where the runs do.
    part = sharded.part
    num_runs = math.prod(sharded.shape[: part.dim]) * part.num_blocks
    for dim in reversed(range(len(sizes))):
        num_blocks, rest = divmod(num_runs, math.prod(sizes[:dim]))
        if not num_blocks or rest or sizes[dim] % num_blocks:
            continue
        own_length = part.own_length(sizes[dim] // num_blocks)
        if own_length is not None:
            return dim, num_blocks, own_length
    return None


def transpose(
    func: Any, sharded: Any, dim0: int | None = None, dim1: int | None = None, **_: Any
) -> Any:
    """Swap two dimensions."""
    if dim0 is None or dim1 is None:
        return NotImplemented
    part: Part = sharded.part
    swapped = {dim0 % sharded.ndim: dim1 % sharded.ndim, dim1 % sharded.ndim: dim0 % sharded.ndim}
    return part.widen(func(part.local, dim0, dim1), swapped.get(part.dim, part.dim))


def permute(func: Any, sharded: Any, *dims: Any, **kwargs: Any) -> Any:
    """Put the dimensions in another order."""
    order = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
    if isinstance(order, int):
        return NotImplemented
    part: Part = sharded.part
    places = [dim % sharded.ndim for dim in order]
    return part.widen(func(part.local, places), places.index(part.dim))


def unsqueeze(func: Any, sharded: Any, dim: int) -> Any:
    """Add a dimension of size 1."""
    part: Part = sharded.part
    place = dim % (sharded.ndim + 1)
    return part.widen(func(part.local, place), part.dim + (place <= part.dim))


def squeeze(func: Any, sharded: Any, *dim: Any, **_: Any) -> Any:
    """Take away a dimension of size 1."""
    part: Part = sharded.part
    if len(dim) != 1 or not isinstance(dim[0], int) or dim[0] % sharded.ndim == part.dim:
        return NotImplemented
    result = func(part.local, dim[0])
    is_before = dim[0] % sharded.ndim < part.dim and result.ndim < sharded.ndim
    return part.widen(result, part.dim - is_before)


def expand(func: Any, sharded: Any, *shape: Any, **kwargs: Any) -> Any:
    """Repeat along dimensions of size 1, without memory."""
    part: Part = sharded.part
    sizes = _listed(shape)
    dim = len(sizes) - part.place
    if kwargs or dim < 0 or sizes[dim] not in (-1, part.width):
        return NotImplemented
    sizes[dim] = -1
    return part.widen(func(part.local, sizes), dim)


def repeat_interleave(func: Any, sharded: Any, repeats: Any, dim: Any = None) -> Any:
    """Repeat each entry, such as a head of keys for its queries, on the rank that has it."""
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return NotImplemented
    part: Part = sharded.part
    return part.widen(func(part.local, repeats, dim))


def split(func: Any, sharded: Any, size: Any = None, dim: int = 0, **_: Any) -> Any:
    """Split or chunk along another dimension, or into whole blocks."""
    part: Part = sharded.part
    if size is None:
        return NotImplemented
    if dim % sharded.ndim != part.dim:
        return tuple(part.widen(shard) for shard in func(part.local, size, dim))
    if func.__name__ == "chunk":
        size = -(-part.width // size)
    sizes = [size] * (part.width // size) if isinstance(size, int) else size
    block = part.width // part.num_blocks
    if sum(sizes) != part.width or any(one == 0 or one % block for one in sizes):
        return NotImplemented
    own = part.local.shape[part.dim] // part.num_blocks
    local = torch.split(part.local, [one // block * own for one in sizes], dim)
    return tuple(
        part.widen(shard, num_blocks=one // block) for shard, one in zip(local, sizes, strict=True)
    )


def unbind(func: Any, sharded: Any, dim: int = 0) -> Any:
    """Take the entries of another dimension."""
    part: Part = sharded.part
    place = dim % sharded.ndim
    if place == part.dim:
        return NotImplemented
    return tuple(part.widen(one, part.dim - (place < part.dim)) for one in func(part.local, place))


def along(func: Any, sharded: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Do an operation along another dimension, of which each rank has all entries."""
    part: Part = sharded.part
    if not isinstance(dim, int) or dim % sharded.ndim == part.dim:
        return NotImplemented
    return part.widen(func(part.local, dim, *args, **kwargs))


def widened(part: Part, result: Any, dims: Collection[int]) -> Any:
    """Return results along other dimensions, which they may have kept or not, as wider tensors."""
    if isinstance(result, Tensor):
        is_kept = result.ndim == part.local.ndim
        return part.widen(result, part.dim - (0 if is_kept else sum(d < part.dim for d in dims)))
    both = [widened(part, one, dims) for one in result]
    return tuple(both) if type(result) in (tuple, list) else type(result)(both)


def as_pairs(func: Any, sharded: Any) -> Any:
    """Read pairs of the last dimension as complex numbers, or the other way."""
    part: Part = sharded.part
    if func.__name__ == "view_as_complex" and part.place == 1:
        return NotImplemented
    return part.widen(func(part.local))


def joined(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate or stack along another dimension; tensors that are full are cut."""
    is_stack = func.__name__ == "stack"
    # torch passes over a cache that is empty yet
    given = [one for one in tensors if _is_sharded(one) or tuple(one.shape) != (0,)]
    part: Part = next(one.part for one in given if _is_sharded(one))
    if len(given) == 1 and not is_stack:
        return part.widen(func([part.local], dim))
    place = dim % (part.local.ndim + is_stack)
    if (place == part.dim and not is_stack) or any(one.ndim != part.local.ndim for one in given):
        return NotImplemented
    own = [
        part.operand(one)
        if _is_sharded(one) or one.shape[part.dim] != part.width
        else part.split(one, part.dim)
        for one in given
    ]
    if any(one is NotImplemented or one.shape[part.dim] != own[0].shape[part.dim] for one in own):
        return NotImplemented
    return part.widen(func(own, dim), part.dim + (is_stack and place <= part.dim))


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DimShardedTensor)


def getitem(func: Any, sharded: Any, index: Any) -> Any:
    """Index a tensor, where the sharded dimension stays or whole blocks of it are taken."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if all(map(_is_basic, entries)):
        return _slices(func, sharded, entries)
    return _rows(func, sharded, entries)


def _is_basic(entry: Any) -> bool:
    is_number = isinstance(entry, int) and not isinstance(entry, bool)
    return is_number or entry is None or entry is Ellipsis or isinstance(entry, slice)


def _slices(func: Any, sharded: Any, entries: list[Any]) -> Any:
    """Index by numbers and slices; the sharded dimension's slice takes whole blocks."""
    part: Part = sharded.part
    num_named = sum(one is not None and one is not Ellipsis for one in entries)
    gap = next((i for i, one in enumerate(entries) if one is Ellipsis), len(entries))
    rest = [slice(None)] * (sharded.ndim - num_named)
    entries = [*entries[:gap], *rest, *entries[gap + 1 :]]
    named = [i for i, one in enumerate(entries) if one is not None]
    if len(named) != sharded.ndim:
        return NotImplemented
    own = named[part.dim]
    taken = _blocks_of(entries[own], part)
    if taken is None:
        return NotImplemented
    entries[own], num_blocks = taken
    dim = sum(not isinstance(one, int) for one in entries[:own])
    return part.widen(func(part.local, tuple(entries)), dim, num_blocks)


def _blocks_of(entry: Any, part: Part) -> tuple[slice, int] | None:
    """Return the part of a slice that takes whole blocks, and how many it takes."""
    if not isinstance(entry, slice):
        return None
    start, stop, step = entry.indices(part.width)
    block = part.width // part.num_blocks
    if step != 1 or start >= stop or start % block or stop % block:
        return None
    own = part.local.shape[part.dim] // part.num_blocks
    return slice(start // block * own, stop // block * own), (stop - start) // block


def _rows(func: Any, sharded: Any, entries: list[Any]) -> Any:
    """Index also by masks and lists, of dimensions before the last, which is the sharded one."""
    part: Part = sharded.part
    if part.place != 1 or not all(map(_is_plain, entries)):
        return NotImplemented
    gap = next((i for i, one in enumerate(entries) if one is Ellipsis), None)
    named = entries if gap is None else entries[gap + 1 :]
    covers_last = sum(map(_dims_of, named)) >= (sharded.ndim if gap is None else 1)
    if covers_last:
        is_full = isinstance(named[-1], slice) and named[-1] == slice(None)
    else:
        is_full = gap is None or not named
    if not is_full:
        return NotImplemented
    result = func(part.local, tuple(entries))
    return part.widen(result, result.ndim - 1)


def _is_plain(entry: Any) -> bool:
    """Whether an index's entry is of a kind whose dimensions `_dims_of` counts."""
    if isinstance(entry, list):
        return all(type(one) is int for one in entry)
    is_known = entry is None or entry is Ellipsis or isinstance(entry, int | slice | Tensor)
    return is_known and not isinstance(entry, DimShardedTensor)


def _dims_of(entry: Any) -> int:
    """Return the number of dimensions that an index's entry stands for."""
    if entry is None or isinstance(entry, bool):
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _listed(shape: tuple[Any, ...]) -> list[Any]:
    """Return sizes that were given one by one, or together."""
    return list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
