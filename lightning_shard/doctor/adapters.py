"""This host's adapters: which leads to other hosts, and how fast they are, as Linux says."""

import contextlib
import re
from pathlib import Path

from lightning_shard.backends.guarded.addresses import address_towards, interface_of

_FAR = "192.0.2.1"  # for documentation (RFC 5737): the default route leads there
_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")


def outward() -> tuple[str | None, str]:
    """Return the name and the address of the interface of the default route; nothing is sent.

    Raises:
        OSError: No interface leads to other hosts.
    """
    address = address_towards(_FAR, 0)
    return interface_of(address), address


def adapter_speed(infiniband: Path = _INFINIBAND, net: Path = _NET) -> tuple[float, str] | None:
    """Return the bytes a second of the host's adapters, and which those are.

    InfiniBand and RoCE adapters count together; without any, the interface of the default route.

    Args:
        infiniband: Folder in which the system lists such adapters.
        net: Folder in which it lists interfaces.

    Returns:
        None where the system does not say, as on most virtual machines.
    """
    gigabits = [_gigabits(one) for one in sorted(infiniband.glob("*/ports/*/rate"))]
    if sum(gigabits):
        return sum(gigabits) * 1e9 / 8, f"{len(gigabits)} ports in {infiniband}"
    with contextlib.suppress(OSError, ValueError):
        interface, _ = outward()
        megabits = int((net / str(interface) / "speed").read_text())
        if megabits > 0:  # -1 where the driver does not know
            return megabits * 1e6 / 8, f"{interface} of {megabits / 1000:g} Gb/s"
    return None


def _gigabits(rate: Path) -> float:
    """Read a port's rate, such as "400 Gb/sec (4X NDR)"; 0 where it is down."""
    state = rate.with_name("state")
    if state.exists() and "ACTIVE" not in state.read_text():
        return 0.0
    found = re.match(r"\s*([\d.]+) Gb/sec", rate.read_text())
    return float(found[1]) if found else 0.0
