"""This host: cores, memory, limits, shared memory, clock, and the file system of this directory."""

import contextlib
import ctypes
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_shard.tools.doctor.finding import Finding, absent, failure, judged, ok, size, warning

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
    told = f"{own} of {all_of_them}" if own < all_of_them else str(own)
    return ok("cores", told)


def _memory() -> Finding:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = memory_bytes()
    if own < whole:
        told = f"{size(own)}, the container's limit on a host of {size(whole)}"
        return ok("memory", told)
    return ok("memory", size(whole))


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return ok("open files", f"at most {soft}")
    return warning(
        "open files",
        f"at most {soft}",
        f"Loaders with many workers and ranks need more: ulimit -n {min(65536, hard)}",
    )


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
    if free >= _LEAST_SHARED:
        return ok(subject, told)
    return warning(
        subject,
        told,
        "Workers of loaders die with 'Bus error' where it is full: docker run "
        "--shm-size=8g, --ipc=host, or in Kubernetes an emptyDir of medium Memory at /dev/shm.",
    )


def _clock() -> Finding:
    state = _kernel_clock_state()
    if state is None:
        return absent("clock", "the system does not say")
    if state == _CLOCK_IS_NOT_SET:
        return warning(
            "clock",
            f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, not synchronised",
            "Logs and time-outs of several hosts are compared: run chrony or "
            "systemd-timesyncd on the host.",
        )
    return ok("clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, synchronised")


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
