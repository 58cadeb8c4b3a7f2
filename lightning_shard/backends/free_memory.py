"""How many bytes a device could still take, and what a rank that frees some keeps of them.

What a CPU rank frees stays with its process: glibc by itself gives back the end of its heap, and
the next step faults it in again, 29 MB of a step of 3.4 million parameters, since here gradients
move into flat buffers and the end of a backward frees everything. Whoever sets glibc's variables
keeps their values.

Threads other than the main one (Ray trains on one) have heaps of 64 MB each, and glibc unmaps one
that is empty unless the one before has less room than the padding. So the padding is a whole heap:
addresses, which take no memory until written.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_LONGEST_END = 2**31 - 1  # bytes at the end of the heap: the most that mallopt's int says
_HEAP_BYTES = 64 << 20  # of a thread's heaps
LARGEST_BLOCK_BYTES = 32 << 20  # the most that glibc takes; larger ones are mapped each time
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a CPU (the host) or a CUDA device could still take; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + kept
    if device.type == "cpu":
        return free_host_bytes()
    return None


def free_host_bytes(
    meminfo: Path = _MEMINFO, group: Path = _GROUP, groups: Path = _GROUPS
) -> int | None:
    """Return the bytes that this host and the limits of its control groups could still give."""
    known = [_available(meminfo), *_left_of_limits(group, groups)]
    return min((one for one in known if one is not None), default=None)


def _available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _left_of_limits(group: Path, groups: Path) -> list[int]:
    """Return what is left of the limit of each group that this process is in."""
    path = next((line[3:] for line in _read(group).splitlines() if line.startswith("0::")), None)
    if path is None:
        return []
    own = groups / path.strip("/")
    above = [one for one in own.parents if one == groups or groups in one.parents]
    return [left for one in (own, *above) if (left := _left(one)) is not None]


def _left(group: Path) -> int | None:
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():  # "max" is none
        return None
    rows = (line.split() for line in _read(group / "memory.stat").splitlines())
    given_back = sum(int(row[1]) for row in rows if row[0] == "inactive_file")
    return max(int(limit) - int(used) + given_back, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def keep_freed_memory(device: torch.device) -> None:
    """Let a process whose rank computes on the CPU keep what it frees, up to 2 GiB of it."""
    if device.type == "cpu":
        _keep()


@cache
def _keep() -> bool:
    """Set glibc's thresholds once in a process; return whether they were set."""
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in chosen:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not where the C library is another
    if mallopt is None:
        return False
    values = (
        (_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES),
        (_TRIM_THRESHOLD, _LONGEST_END),
        (_TOP_PAD, _HEAP_BYTES),
    )
    return all(mallopt(*one) for one in values)
