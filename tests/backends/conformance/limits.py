"""What each backend cannot do, and says so: errors that the suite expects.

A limit that upstream mends makes its test fail: strike it here then. Gloo's are seen with torch
2.11, 2.13 and 2.14; NCCL's with torch 2.11 on one GPU, those of several as its process group's
source refuses them.
"""

import torch
from torch.torch_version import TorchVersion

from tests.backends.conformance.suite import Limit

_COLLECTIVES_BY_DTYPE = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
_UNKNOWN_TO_GLOO = ("int16", "float8_e5m2", "float8_e4m3fn")
# torch 2.14 asks for a device that the group takes, not for a name.
_GLOO_ONLY = (
    {"a_monitored_barrier": Limit(error="ValueError", match="only implemented for GLOO")}
    if TorchVersion(torch.__version__) < (2, 14)
    else {}
)

_GLOO = {
    f"{operation}_of_{dtype}": Limit(error="RuntimeError", match="Invalid scalar type")
    for operation in _COLLECTIVES_BY_DTYPE
    for dtype in _UNKNOWN_TO_GLOO
}
_GLOO |= {
    f"coalesced_{operations}": Limit(error="RuntimeError", match="not implement startCoalescing")
    for operations in ("all_reduces", "all_gathers", "reduce_scatters")
}
_GLOO |= {
    "all_gather_into_an_uneven_list": Limit(error="RuntimeError", match="invalid tensor size"),
    "all_to_all_of_an_uneven_list": Limit(
        error="RuntimeError", match="invalid tensor size|not support alltoall"
    ),
    "all_gather_of_matrices_stacked": Limit(error="RuntimeError", match="invalid tensor size"),
    "polling_reduce_scatter": Limit(error="AssertionError", match="not completed after"),
    "the_future_of_reduce_scatter": Limit(error="RuntimeError", match="getFuture not implemented"),
    "a_message_of_a_view_with_strides": Limit(error="RuntimeError", match="to be contiguous"),
    "all_reduce_by_AVG_of_integers": Limit(error="RuntimeError", match="Float can't be cast"),
    "all_reduce_by_PREMUL_SUM": Limit(error="RuntimeError", match="PREMUL_SUM with Gloo"),
}
_NCCL = {
    f"{operation}_of_int16": Limit(error="TypeError", match="not supported for NCCL")
    for operation in _COLLECTIVES_BY_DTYPE
    if operation != "reduce_scatter" or torch.cuda.device_count() > 1  # on one rank it is a copy
}
_NCCL["all_to_all_of_int16"] = Limit(error="RuntimeError", match="Unconvertible NCCL type Short")
_NCCL |= {
    f"all_reduce_bitwise_by_{op}": Limit(error="ValueError", match=f"Cannot use ReduceOp.{op} with")
    for op in ("BAND", "BOR", "BXOR")
}
_NCCL |= {
    f"{operation}_of_a_view_with_strides": Limit(error="ValueError", match="must be contiguous")
    for operation in ("all_reduce", "broadcast", "all_gather")
}
_LIMITS_OF_BACKEND: dict[str, dict[str, Limit]] = {
    "in_process": _GLOO_ONLY,
    "gloo": _GLOO,
    "mpi": _GLOO_ONLY,
    "shm": _GLOO_ONLY,
    "nccl": {**_GLOO_ONLY, **_NCCL},
}

# (backend, check): the error that every rank raises.
LIMITS: dict[tuple[str, str], Limit] = {
    (backend, check): limit
    for backend, limits in _LIMITS_OF_BACKEND.items()
    for check, limit in limits.items()
}
