"""Two hosts on this machine: network and UTS namespaces with their own addresses and host names.

host-a  10.77.0.1  fd77::1 ───── a link that can be cut ───── fd77::2  10.77.0.2  host-b
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
_OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


class TwoHosts:
    """Two hosts with a link between them, made by root.

    Args:
        names: The names of the namespaces.

    Attributes:
        hosts_file: What the hosts have as /etc/hosts; None: this machine's, which names neither.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._links = tuple(f"{name}-v" for name in names)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.hosts_file: Path | None = None

    def make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
            self._inside(name, "link", "set", "lo", "up")
        _ip("link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
        for name, link, *addresses in zip(
            self._names, self._links, ADDRESSES, ADDRESSES_6, strict=True
        ):
            _ip("link", "set", link, "netns", name)
            self._inside(name, "addr", "add", f"{addresses[0]}/24", "dev", link)
            self._inside(name, "addr", "add", f"{addresses[1]}/64", "dev", link, "nodad")
            self._inside(name, "link", "set", link, "up")

    def enter(self, host: int) -> list[str]:
        """Return what comes before a command to have it run on a host."""
        named = f'hostname {NAMES[host]}; exec "$@"'
        if self.hosts_file is not None:  # `ip netns exec` makes a mount namespace of its own
            named = f"mount --bind {shlex.quote(str(self.hosts_file))} /etc/hosts; {named}"
        return ["ip", "netns", "exec", self._names[host], "unshare", "-u", "sh", "-c", named, "sh"]

    def start(
        self, host: int, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host, its output in a file."""
        environment = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.enter(host), *command],
                cwd=REPOSITORY,
                env=environment | {"OMP_NUM_THREADS": "1", "NODE_RANK": str(host)} | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """Cut the link: nothing reaches the other host any more, no reset either."""
        self._inside(self._names[1], "link", "set", self._links[1], "down")

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self._names:
            _end_all_in(name)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _inside(self, name: str, *arguments: str) -> None:
        _ip("-n", name, *arguments)


def _end_all_in(name: str) -> None:
    """End what daemons have started inside a namespace, which nobody waits for."""
    told = subprocess.run(
        ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
    )
    for process in told.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or error
        pytest.fail(
            f"`ip {' '.join(arguments)}` failed: {told}. Tests of several hosts need root, "
            "iproute2 and network namespaces: run `make test-cluster` where these are."
        )


@contextmanager
def two_hosts() -> Iterator[Any]:
    """Make two hosts, and remove them with all that was started on them."""
    hosts = TwoHosts((f"ls{os.getpid()}a", f"ls{os.getpid()}b"))
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


@contextmanager
def two_named_hosts(folder: Path) -> Iterator[Any]:
    """Make two hosts that know each other's names."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    with two_hosts() as hosts:
        hosts.hosts_file = folder / "etc_hosts"
        hosts.hosts_file.write_text("\n".join(lines) + "\n")
        yield hosts
