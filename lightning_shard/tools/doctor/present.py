"""What is installed, what backends need and who has started this process, without torch.

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

from lightning_shard.core import settings
from lightning_shard.errors import ConfigError
from lightning_shard.tools.doctor.finding import Finding, failure, judged, ok, warning

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


_BY_HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "LIGHTNING_SHARD_DEBUG": "ranks compare every call before they make it",
    "TORCH_DISTRIBUTED_DEBUG": "torch checks collectives",
    "CUDA_LAUNCH_BLOCKING": "a GPU's kernels run one by one",
    "NCCL_DEBUG": "NCCL logs",
}
_OFF = ("", "0", "OFF", "WARN")


def launcher() -> Iterator[Finding]:
    """Yield what the launcher's variables say."""
    found = [names for names in _candidates() if names is not None]
    for names in found:
        yield _placed(names)
    if not found:
        yield _without()
    if len({_rank(names) for names in found}) > 1:
        yield failure(
            "launchers",
            " and ".join(f"{names.launcher} says rank {_rank(names)}" for names in found),
            "One launcher inside another: start with one, or unset the variables of the outer one.",
        )
    yield from _job()
    slow = [name for name in _SLOW if settings.given(name) not in _OFF]
    for name in slow:
        yield warning(
            name,
            f"is {settings.given(name)}: {_SLOW[name]}",
            f"unset {name} for runs that should be fast.",
        )


def _candidates() -> Iterator[settings.LauncherVariables | None]:
    yield settings.TORCHRUN if settings.given("TORCHELASTIC_RUN_ID") else None
    yield settings.SLURM if settings.given(settings.SLURM.rank) else None
    yield settings.mpi_variables()


def _rank(names: settings.LauncherVariables) -> str:
    return settings.given(names.rank)


def _placed(names: settings.LauncherVariables) -> Finding:
    try:
        place = settings.placement(names)
    except ConfigError as error:
        return failure(names.launcher, str(error), f"Start with {names.start.format('N')}.")
    hosts = "" if place.num_nodes is None else f" on host {place.node_rank} of {place.num_nodes}"
    return ok(
        names.launcher,
        f"rank {place.rank} of {place.world_size}, local rank {place.local_rank}{hosts}",
    )


def _without() -> Finding:
    by_hand = [name for name in _BY_HAND if settings.given(name)]
    if not by_hand:
        return ok("launcher", "none: a Trainer starts the ranks of this host")
    found = f"none that is known, but {', '.join(by_hand)} set by hand"
    advice = f"unset {' '.join(by_hand)}, or set all of {', '.join(_BY_HAND)} for every rank."
    return judged(len(by_hand) == len(_BY_HAND), "launcher", found, advice)


def _job() -> Iterator[Finding]:
    try:
        job = settings.job()
    except ConfigError as error:
        yield failure("elastic job", str(error))
        return
    if job is not None:
        token = "with a token" if job.token else "without a token"
        advice = "Set LIGHTNING_SHARD_JOB_TOKEN; see docs/security.md."
        yield judged(bool(job.token), "elastic job", f"{job.host}:{job.port}, {token}", advice)
