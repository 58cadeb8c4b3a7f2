"""Tensors as memory to move: out of autograd's sight, one after the other, never overlapping."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """Return the tensor's data apart from autograd, so that writes do not raise its version."""
    return tensor.data


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, uint8, 1-D: where they lie, or a copy of what is strided."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, which has as many elements."""
    if target.shape != source.shape:
        source = source.reshape(target.shape)
    raw(target).copy_(source)


def unaliased(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> list[Tensor]:
    """Return the sources; those that share memory with a target are copied before it is written."""
    written = {_storage_address(target) for target in targets if target.numel()}
    return [
        raw(source).clone() if _storage_address(source) in written else raw(source)
        for source in sources
    ]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype one after the other: their memory, or a copy."""
    own = _as_one(tensors)
    return torch.cat([raw(tensor).reshape(-1) for tensor in tensors]) if own is None else own


def room_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat tensor for the tensors' elements: their own memory, or new; see `unpack`."""
    own = _as_one(tensors)
    numel = sum(tensor.numel() for tensor in tensors)
    return raw(tensors[0]).new_empty(numel) if own is None else own


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what lies in `flat` into the tensors, unless it lies there already."""
    own = _as_one(tensors)
    if flat.numel() == 0 or (own is not None and own.data_ptr() == flat.data_ptr()):
        return
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        write(tensor, part)


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one flat view, if each begins where the one before it ends."""
    first = raw(tensors[0])
    address = first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() != address):
            return None
        address += tensor.numel() * tensor.itemsize
    if len(tensors) == 1:
        return first.view(-1)
    if len({_storage_address(tensor) for tensor in tensors}) > 1:
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
