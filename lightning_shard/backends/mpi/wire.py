"""Tensors as MPI sees them: memory, a count, and a type of the element's size.

Nothing is computed by MPI, so that a type says only how many bytes an element has. Counts are
elements, not bytes, since MPI's counts end at 2**31 - 1.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_shard.backends.mpi.runtime import mpi
from lightning_shard.backends.streams import drain_streams
from lightning_shard.errors import LayoutError

_MOST_ELEMENTS = 2**31 - 1


def full(tensor: Tensor) -> list[Any]:
    """Describe a contiguous tensor to MPI."""
    return [_memory(tensor), _checked(tensor.numel()), _type_of_size(tensor.itemsize)]


def parts(tensor: Tensor, counts: Sequence[int]) -> list[Any]:
    """Describe a contiguous tensor whose parts, one for each rank, lie one after the other."""
    _checked(tensor.numel())
    return [_memory(tensor), (list(counts), None), _type_of_size(tensor.itemsize)]


def _memory(tensor: Tensor) -> Any:
    drain_streams([tensor])  # MPI knows no streams
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


def _type_of_size(itemsize: int) -> Any:
    module = mpi()
    types = {
        1: module.BYTE,
        2: module.INT16_T,
        4: module.INT32_T,
        8: module.INT64_T,
        16: module.C_DOUBLE_COMPLEX,
    }
    return types[itemsize]


def _checked(numel: int) -> int:
    if numel > _MOST_ELEMENTS:
        raise LayoutError(
            f"mpi: got a tensor of {numel} elements, expected at most {_MOST_ELEMENTS} in one "
            "operation. Communicate it in parts, or use smaller units."
        )
    return numel
