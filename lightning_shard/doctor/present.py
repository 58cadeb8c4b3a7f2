"""What is installed and what backends need, looked for without torch.

A second is enough to say what this machine has: versions are what the installed distributions say.
The backends themselves, which `doctor` asks, need torch to say whether they can run here.
"""

import contextlib
import ctypes
import importlib.util
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_shard.doctor.finding import Finding, failure, ok

_PACKAGE = "lightning-shard"
_PYTHON = ">=3.11"
_SHM_MACHINES = ("x86_64",)


def software() -> Iterator[Finding]:
    """Yield the versions of Python and of what this package needs."""
    own = platform.python_version()
    yield _judged("python", own, SpecifierSet(_PYTHON), f"{own} at {sys.executable}")
    for line in requires(_PACKAGE) or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield _installed(wanted)


def _installed(wanted: Requirement) -> Finding:
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return failure(
            wanted.name, "not installed", f"pip install '{wanted.name}{wanted.specifier}'"
        )
    return _judged(wanted.name, found, wanted.specifier, found)


def _judged(name: str, found: str, wanted: SpecifierSet, told: str) -> Finding:
    if wanted.contains(found, prereleases=True):
        return ok(name, told)
    return failure(
        name,
        f"{told}, expected {wanted}",
        "Install Python 3.11 or 3.12." if name == "python" else f"pip install '{name}{wanted}'",
    )


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
