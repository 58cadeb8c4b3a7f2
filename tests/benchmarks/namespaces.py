"""Two hosts on one machine: network namespaces joined by a cable of a given speed.

    namespace a   10.77.0.1 ── veth, tbf 100 Mbit/s ──── tbf, veth ── 10.77.0.2   namespace b

It takes Linux, root, and iproute2's `ip` and `tc`. Nothing outside the two namespaces is touched,
and nothing of them is left afterwards.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_BURST = "32kb"  # what may leave at once above the rate
_QUEUE = "200ms"  # what may wait to leave, as time at the rate


class Host(NamedTuple):
    """One of the two."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs `words` there."""
        return ["ip", "netns", "exec", self.namespace, *words]


def why_not() -> str | None:
    """Say why there can be no namespaces here; None where there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2's {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = f"ls{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip()
    _run("ip", "netns", "del", trial)
    return None


@contextmanager
def two_hosts(megabits: float) -> Iterator[tuple[Host, Host]]:
    """Make two hosts, each of which sends at most so many Mbit/s to the other."""
    number = os.getpid()
    hosts = tuple(
        Host(f"ls{number}{end}", f"v{number}{end}", f"10.77.0.{place}")
        for place, end in enumerate("ab", start=1)
    )
    first, second = hosts
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", first.interface, "type", "veth", "peer", second.interface)
        for host in hosts:
            _connect(host, megabits)
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _connect(host: Host, megabits: float) -> None:
    inside = ("ip", "-n", host.namespace)
    _run("ip", "link", "set", host.interface, "netns", host.namespace)
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
    for interface in (host.interface, "lo"):
        _run(*inside, "link", "set", interface, "up")
    shape = ("tbf", "rate", f"{megabits}mbit", "burst", _BURST, "latency", _QUEUE)
    _run(*host.command("tc", "qdisc", "add", "dev", host.interface, "root", *shape))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
