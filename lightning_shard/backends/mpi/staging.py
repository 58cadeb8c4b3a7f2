"""GPU tensors over an MPI that knows host memory only: through a copy on the host."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from lightning_shard.backends.calls import Call
from lightning_shard.backends.mpi.operations import GroupOfRanks, Steps
from lightning_shard.backends.mpi.runtime import is_cuda_aware, mpi
from lightning_shard.backends.packing import raw, write


def must_stage(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors lie where MPI cannot reach; the first time, rank 0 warns."""
    if all(tensor.device.type == "cpu" for tensor in tensors) or is_cuda_aware():
        return False
    _warn_once()
    return True


def staged(
    operation: Callable[[GroupOfRanks, Call], Steps], group: GroupOfRanks, call: Call
) -> Steps:
    """Carry `call` out on copies in host memory, and copy the results back."""
    with torch.inference_mode():
        host = replace(
            call,
            inputs=[raw(tensor).cpu() for tensor in call.inputs],
            outputs=[raw(tensor).cpu() for tensor in call.outputs],
        )
    yield from operation(group, host)
    written = call.outputs or call.inputs
    for target, source in zip(written, host.outputs or host.inputs, strict=True):
        write(target, source)


@cache
def _warn_once() -> None:
    if mpi().COMM_WORLD.rank == 0:
        warnings.warn(
            "This MPI library does not take GPU memory: tensors travel through copies on the host. "
            "Use an MPI built with CUDA, or backend='nccl'.",
            stacklevel=2,
        )
