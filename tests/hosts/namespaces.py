"""Hosts on this machine: network and UTS namespaces with their own addresses and host names.

host-a  10.77.0.1  fd77::1 ──┐
                             ├── a switch: a bridge in a namespace of its own
host-b  10.77.0.2  fd77::2 ──┘

Each link can be cut, slowed down or filtered. There may be a third host.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
ADDRESSES_6 = ("fd77::1", "fd77::2", "fd77::3")
_HIGHEST_PORT = 65534  # of those that `ip rule` takes
_OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


class Hosts:
    """Hosts on a switch, made by root.

    Attributes:
        hosts_file: What the hosts have as /etc/hosts; None: this machine's, which names none.
    """

    def __init__(self, prefix: str, num: int) -> None:
        self._names = [f"{prefix}{host}" for host in range(num)]
        self._links = [f"{prefix}{host}v" for host in range(num)]
        self._switch = f"{prefix}s"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.hosts_file: Path | None = None

    def make(self) -> None:
        _ip("netns", "add", self._switch)
        self._inside(self._switch, "link", "add", "switch", "type", "bridge")
        self._inside(self._switch, "link", "set", "switch", "up")
        for name, link, *addresses in zip(
            self._names, self._links, ADDRESSES, ADDRESSES_6, strict=False
        ):
            _ip("netns", "add", name)
            self._inside(name, "link", "set", "lo", "up")
            plugged = ("peer", "name", f"{link}s", "netns", self._switch)
            _ip("link", "add", link, "netns", name, "type", "veth", *plugged)
            self._inside(self._switch, "link", "set", f"{link}s", "master", "switch", "up")
            self._inside(name, "addr", "add", f"{addresses[0]}/24", "dev", link)
            self._inside(name, "addr", "add", f"{addresses[1]}/64", "dev", link, "nodad")
            self._inside(name, "link", "set", link, "up")

    def enter(self, host: int) -> list[str]:
        """Return what comes before a command to have it run on a host."""
        named = f'hostname host-{"abc"[host]}; exec "$@"'
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

    @property
    def first(self) -> "subprocess.Popen[bytes]":
        """The process that was started first."""
        return self._processes[0]

    def wait_for(self, words: str, log: Path) -> None:
        """Wait until a log has these words; fail when the process that was started first ends."""
        while words not in log.read_text(errors="replace"):
            assert self.first.poll() is None, log.read_text(errors="replace")
            time.sleep(0.1)

    def cut(self, host: int = 1) -> None:
        """Cut a host's link: nothing reaches the others any more, no reset either."""
        self._inside(self._names[host], "link", "set", self._links[host], "down")

    def slow_down(self, megabits: float) -> None:
        """Let each host send at most so many Mbit/s."""
        speed = ["rate", f"{megabits}mbit", "burst", "32kb", "latency", "400ms"]
        for name, link in zip(self._names, self._links, strict=True):
            command = ["tc", "qdisc", "add", "dev", link, "root", "tbf", *speed]
            _run(["ip", "netns", "exec", name, *command])

    def filter(self, host: int, first_port: int, last_port: int = _HIGHEST_PORT) -> None:
        """Drop what comes to these TCP ports of a host, without an answer, as a firewall does."""
        name, ports = self._names[host], f"{first_port}-{last_port}"
        arriving = ["iif", self._links[host], "ipproto", "tcp", "dport", ports]
        self._inside(name, "rule", "add", "pref", "10", *arriving, "blackhole")
        # What is for the host itself is looked up first of all otherwise.
        self._inside(name, "rule", "add", "pref", "20", "lookup", "local")
        self._inside(name, "rule", "del", "pref", "0")

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in (*self._names, self._switch):
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
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or error
        pytest.fail(
            f"`{' '.join(command)}` failed: {told}. Tests of several hosts need root, "
            "iproute2 and network namespaces: run `make test-cluster` where these are."
        )


@contextmanager
def made_hosts(num: int = 2) -> Iterator[Any]:
    """Make two hosts, or more, and remove them with all that was started on them."""
    hosts = Hosts(f"ls{os.getpid()}", num)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


@contextmanager
def named_hosts(folder: Path) -> Iterator[Any]:
    """Make two hosts that know each other's names."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=False)]
    with made_hosts() as hosts:
        hosts.hosts_file = folder / "etc_hosts"
        hosts.hosts_file.write_text("\n".join(lines) + "\n")
        yield hosts
