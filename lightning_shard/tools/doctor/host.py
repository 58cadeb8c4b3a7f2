"""This host without torch: what it has, what is installed, and who started this process.

A second is enough to say that: versions are what the installed distributions say. Whether backends
can run here needs torch, see `communication`.
"""

import contextlib
import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_shard.core import settings
from lightning_shard.core.extras import missing
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.errors import ConfigError

State = Literal["ok", "absent", "warning", "failure"]
size = partial(format_bytes, digits=".4g")


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        state: "ok"; "absent", which matters only to those who want it; "warning", where something
            is slow or fails later; "failure", where training does.
        advice: What to do; empty where nothing has to be done.
    """

    state: State
    subject: str
    found: str
    advice: str = ""


ok = partial(Finding, "ok")
absent = partial(Finding, "absent")
warning = partial(Finding, "warning")
failure = partial(Finding, "failure")


def judged(is_ok: bool, subject: str, found: str, advice: str) -> Finding:
    """Return that something is as it should be, or else slow or failing later, with advice."""
    return ok(subject, found) if is_ok else warning(subject, found, advice)


_CGROUP = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")
_LEAST_SHARED = 2**30
_LEAST_FREE = 10 * 2**30
_LEAST_FILES = 4096
_MOST_SKEW_SECONDS = 2.0
_CLOCK_IS_NOT_SET = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has


def host() -> Iterator[Finding]:
    """Yield what this host has."""
    yield _cores()
    yield _memory()
    yield _open_files()
    yield _shared_memory()
    yield _clock()
    yield from _file_system(Path.cwd())


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    with contextlib.suppress(AttributeError):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory that this process may use: the host's, or its container's."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            whole = min(whole, int((_CGROUP / name).read_text()))
    return whole


def _cores() -> Finding:
    own, all_of_them = num_cores(), os.cpu_count() or 1
    return ok("cores", f"{own} of {all_of_them}" if own < all_of_them else str(own))


def _memory() -> Finding:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = memory_bytes()
    limit = f", the container's limit on a host of {size(whole)}" if own < whole else ""
    return ok("memory", f"{size(own)}{limit}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES
    advice = f"Loaders with many workers and ranks need more: ulimit -n {min(65536, hard)}"
    return judged(is_enough, "open files", f"at most {soft}", advice)


def _shared_memory() -> Finding:
    subject = "shared memory"
    if not _SHARED.is_dir():
        return absent(
            subject,
            f"{_SHARED} is not there",
            "The backend shm and loaders with workers use it; macOS has none.",
        )
    whole, _, free = shutil.disk_usage(_SHARED)
    told = f"{_SHARED}: {size(free)} free of {size(whole)}"
    advice = (
        "Workers of loaders die with 'Bus error' where it is full: docker run "
        "--shm-size=8g, --ipc=host, or in Kubernetes an emptyDir of medium Memory at /dev/shm."
    )
    return judged(free >= _LEAST_SHARED, subject, told, advice)


def _clock() -> Finding:
    state = _kernel_clock_state()
    if state is None:
        return absent("clock", "the system does not say")
    is_set = state != _CLOCK_IS_NOT_SET
    told = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {'' if is_set else 'not '}synchronised"
    advice = (
        "Logs and time-outs of several hosts are compared: run chrony or systemd-timesyncd on the "
        "host."
    )
    return judged(is_set, "clock", told, advice)


def _kernel_clock_state() -> int | None:
    """Return what adjtimex(2) says of the clock; None where there is no such call."""
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        return None if found < 0 else int(found)
    return None


def _file_system(folder: Path) -> Iterator[Finding]:
    subject = "this directory"
    try:
        skew = _replaced_file(folder)
    except OSError as error:
        yield failure(
            subject,
            f"{folder}: {error}",
            "Checkpoints are written, synced and renamed there: run where you may write, or "
            "give the Trainer default_root_dir=.",
        )
        return
    free = shutil.disk_usage(folder).free
    told = f"{folder}: written, synced and replaced a file; {size(free)} free"
    advice = "A checkpoint has about 12 bytes for a parameter."
    yield judged(free >= _LEAST_FREE, subject, told, advice)
    if abs(skew) > _MOST_SKEW_SECONDS:
        yield warning(
            "its clock",
            f"differs from this host's by {skew:.1f} s",
            "Which checkpoint is the last is told by times: synchronise the file server.",
        )


def _replaced_file(folder: Path) -> float:
    """Write, sync and replace a file; return how far its time is before this host's clock."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lightning-shard-doctor-") as place:
        new, old = Path(place, "new"), Path(place, "old")
        old.write_bytes(b"old")
        with new.open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        skew = time.time() - new.stat().st_mtime
        new.replace(old)
        if old.read_bytes() != b"new":
            raise OSError("a file that was replaced reads as before")
        return skew


_PACKAGE = "lightning-shard"
_SHM_MACHINES = ("x86_64",)


def software() -> Iterator[Finding]:
    """Yield the versions of Python and of what this package needs."""
    own, wanted_python = platform.python_version(), metadata(_PACKAGE)["Requires-Python"]
    yield _judged("python", own, SpecifierSet(wanted_python), f"{own} at {sys.executable}")
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
        "Install a Python of these versions."
        if name == "python"
        else f"pip install '{name}{wanted}'",
    )


def lacking(backend: str) -> str | None:
    """Say what a backend lacks on this machine, or None where it has what it needs."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    check = {"nccl": _nccl, "mpi": _mpi, "shm": _shm}.get(backend)
    return None if check is None else check()


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
    return missing("mpi4py")


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
