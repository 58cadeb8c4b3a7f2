"""Checks of the tensors of a collective; each error names the rank and the fix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.rank_order import is_narrow
from lightning_shard.errors import ConfigError, LayoutError

# Tags from here up belong to the exchange algorithms; callers' messages stay below.
FIRST_RESERVED_TAG = 1 << 30


def check_contiguous(operation: str, rank: int, tensor: Tensor) -> None:
    """Raise LayoutError unless the elements lie one after the other."""
    if not tensor.is_contiguous():
        raise LayoutError(
            f"{operation} on rank {rank}: got a tensor of shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}, expected a contiguous one. Pass tensor.contiguous()."
        )


def check_flat(operation: str, rank: int, **tensors: Tensor) -> None:
    """Raise LayoutError unless every tensor is one-dimensional and contiguous."""
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise LayoutError(
                f"{operation} on rank {rank}: got {name} of shape {tuple(tensor.shape)}, "
                f"expected one dimension. Pass {name}.view(-1)."
            )
        check_contiguous(operation, rank, tensor)


def check_full_and_local(
    operation: str, rank: int, size: int, *, full: Tensor, local: Tensor
) -> None:
    """Raise LayoutError unless `full` (W * S,) is `size` times as long as `local` (S,)."""
    check_flat(operation, rank, full=full, local=local)
    if full.numel() != size * local.numel():
        raise LayoutError(
            f"{operation} on rank {rank}: got {full.numel()} full and {local.numel()} local "
            f"elements on {size} ranks, expected {size} * {local.numel()} = "
            f"{size * local.numel()} full ones. Pad the full tensor to a multiple of {size}."
        )


def check_slices(
    operation: str, rank: int, sizes: Sequence[int], *, full: Tensor, local: Tensor
) -> None:
    """Raise LayoutError unless slices of these sizes make up `full`, and `local` is the rank's."""
    check_flat(operation, rank, full=full, local=local)
    if sum(sizes) != full.numel() or local.numel() != sizes[rank]:
        raise LayoutError(
            f"{operation} on rank {rank}: got {full.numel()} full and {local.numel()} local "
            f"elements, expected {sum(sizes)} and {sizes[rank]}, as sizes={list(sizes)} says. Pass "
            f"the same sizes on every rank."
        )


def check_same_dtype(operation: str, rank: int, output: Tensor, source: Tensor) -> None:
    """Raise LayoutError unless both tensors hold the same type."""
    if output.dtype != source.dtype:
        raise LayoutError(
            f"{operation} on rank {rank}: got an output of {output.dtype} for an input of "
            f"{source.dtype}, expected the same type. Convert one of them first."
        )


def check_result(operation: str, rank: int, output: Tensor, source: Tensor) -> None:
    """Raise LayoutError unless `output` can hold a result of the shape and type of `source`."""
    check_contiguous(operation, rank, output)
    check_same_dtype(operation, rank, output, source)
    if output.shape != source.shape:
        raise LayoutError(
            f"{operation} on rank {rank}: got an output of shape {tuple(output.shape)} for an "
            f"input of shape {tuple(source.shape)}, expected the same. Pass "
            "torch.empty_like(input)."
        )


def check_sum_dtype(operation: str, rank: int, output: Tensor, source: Tensor) -> None:
    """Raise LayoutError unless the output holds the input's type, or float32 for a narrower one."""
    if is_narrow(source.dtype) and output.dtype == torch.float32:
        return
    check_same_dtype(operation, rank, output, source)


def checked_splits(
    operation: str, rank: int, size: int, name: str, tensor: Tensor, splits: Sequence[int] | None
) -> list[int]:
    """Return the number of the tensor's elements for each rank; splits=None means equally many."""
    numel = tensor.numel()
    if splits is None and numel % size:
        raise LayoutError(
            f"{operation} on rank {rank}: got {numel} {name} elements for {size} ranks, expected a "
            f"multiple of {size}. Pad the tensor, or pass {name}_split_sizes."
        )
    sizes = [numel // size] * size if splits is None else list(splits)
    if len(sizes) != size or sum(sizes) != numel or min(sizes) < 0:
        raise LayoutError(
            f"{operation} on rank {rank}: got {name}_split_sizes={sizes} for {numel} elements, "
            f"expected {size} sizes that add up to {numel}."
        )
    return sizes


def check_peer(operation: str, rank: int, size: int, peer: int) -> None:
    """Raise LayoutError unless `peer` is a rank of this group."""
    if not 0 <= peer < size:
        raise LayoutError(
            f"{operation} on rank {rank}: got peer {peer}, expected a rank of this group, "
            f"0 to {size - 1}. Ranks are counted within the group, not in the world."
        )


def check_message(
    operation: str, rank: int, size: int, tensor: Tensor, peer: int, tag: int
) -> None:
    """Raise unless this tensor can go to or come from `peer` under `tag`."""
    check_contiguous(operation, rank, tensor)
    check_peer(operation, rank, size, peer)
    if peer == rank:
        raise LayoutError(
            f"{operation} on rank {rank}: got this rank itself as the peer, expected another one. "
            "Copy the tensor instead."
        )
    if not 0 <= tag < FIRST_RESERVED_TAG:
        raise ConfigError(
            f"{operation} on rank {rank}: got tag {tag}, expected 0 to {FIRST_RESERVED_TAG - 1}; "
            "those above are reserved for collectives made of messages."
        )
