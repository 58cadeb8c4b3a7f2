"""What backends need, looked for without torch: a second is enough to say what this machine has.

The backends themselves, which `doctor` asks, need torch to say whether they can run here.
"""

import contextlib
import ctypes
import importlib.util
import platform
import sys
from pathlib import Path

_SHM_MACHINES = ("x86_64",)


def absent(backend: str) -> str | None:
    """Say what a backend lacks on this machine, or None where it has what it needs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return {"nccl": _nccl, "mpi": _mpi, "shm": _shm}.get(backend, _nothing)()


def _nothing() -> str | None:
    return None


def _nccl() -> str | None:
    if not _torch_has("libtorch_cuda", "libtorch_hip", "torch_cuda"):
        return "this torch is built without CUDA"
    return None if _num_cuda_devices() else "no CUDA device is visible"


def _torch_has(*libraries: str) -> bool:
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(
        any(Path(folder, "lib").glob(f"{library}.*")) for folder in folders for library in libraries
    )


def _num_cuda_devices() -> int:
    """Return what the driver counts; it heeds CUDA_VISIBLE_DEVICES."""
    count = ctypes.c_int(0)
    for library in ("libcuda.so.1", "nvcuda.dll", "libamdhip64.so"):
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL(library)
            if library == "libamdhip64.so":
                driver.hipGetDeviceCount(ctypes.byref(count))
            elif driver.cuInit(0) == 0:
                driver.cuDeviceGetCount(ctypes.byref(count))
            return count.value
    return 0


def _mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is not None:
        return None
    return "mpi4py is not installed: pip install 'lightning-shard[mpi]'"


def _shm() -> str | None:
    if sys.platform == "linux" and platform.machine() in _SHM_MACHINES:
        return None
    return f"it needs Linux on {' or '.join(_SHM_MACHINES)}"
