"""How many bytes a device could still take, as far as the system says.

cpu     what Linux says is available, and what is left of the limits of the control group (v2)
cuda    what the device has free, and what torch's allocator holds without using it
"""

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


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
