"""How many bytes a device could still take, and what a rank that frees some keeps of them.

cpu     what Linux says is available, and what is left of the limits of the control group (v2)
cuda    what the device has free, and what torch's allocator holds without using it

What a CPU rank frees stays with its process, for the next step.

    glibc by itself    gives back what is freed at the end of its heap, and blocks of their own
    the next step      faults it in again, 4 KB at a time: 29 MB of a step of 3.4 million parameters

Under torch DDP gradients lie at the end of the heap from step to step, and hold all of it. Here
they move into flat buffers, so that the end of a backward frees everything. Between steps a rank
then holds what a step needs: under stages 1 to 3 the benchmark's GPT 400 to 440 MB, at peaks of as
many, and with glibc by itself 370 to 450, at peaks of 400 to 480. Of 3.4 million parameters in
small layers it is 165 to 194 MB beside 139 to 158, at peaks of 158 to 179. Whoever sets glibc's
variables keeps their values.

Threads other than the main one, on which Ray trains, say, have heaps of 64 MB each, and glibc
unmaps one that is empty, whatever its threshold, unless the one before has less room than the
padding: a fit of the benchmark's GPT on such a thread faulted in 35 to 50 MB a step, and took 1.03
times as long. So the padding is a whole heap: addresses, which take no memory until written.
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
    """Return the bytes that a device could still take; None where the system does not say.

    Args:
        device: A CPU, whose memory is the host's, or a CUDA device.
    """
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
    """Return the bytes that this host could still give to this process.

    Args:
        meminfo: Linux's file of that name.
        group: Linux's file that names the control group of this process.
        groups: The root of the control groups.
    """
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
