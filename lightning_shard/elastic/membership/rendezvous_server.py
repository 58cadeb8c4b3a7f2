"""The rendezvous server: a process beside the ranks with the job's store and members.

    rank 0 ──┐ starts it                     ┌── store: where each generation makes its groups
    rank 1 ──┼──── connections each ──> door, server
    newcomer ┘                               └── table: who takes part

It trains nothing and starts nothing, so that no rank's death takes it along; it ends after the last
participant. Who starts it opens its sockets, so that the address is known before it runs.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from typing_extensions import override

from lightning_shard.backends.authentication.addresses import listen
from lightning_shard.backends.authentication.connection import (
    Connection,
    Message,
    Served,
    serve_behind_door,
)
from lightning_shard.backends.authentication.key_values import KeyValueService
from lightning_shard.backends.authentication.loop import Loop
from lightning_shard.backends.authentication.store import SERVICE as STORE
from lightning_shard.backends.authentication.token import find_token
from lightning_shard.core import settings
from lightning_shard.elastic.membership.membership_table import (
    SHORTEST_START_SECONDS,
    Bounds,
    MembershipTable,
)
from lightning_shard.errors import BackendUnavailableError

_LONGEST_TICK_SECONDS = 1.0
_LINGER_SECONDS = 3.0
MEMBER = "member"  # what connections come for
# Not `-m`: the package's own `__init__` imports Lightning, of which the server needs nothing. So it
# finds an empty package of that name, whose modules it can import. It is nobody's child: who has
# started it needs not wait for its end.
_PROGRAM = """
import os, sys, types
if os.fork():
    os._exit(0)
package = sys.modules["lightning_shard"] = types.ModuleType("lightning_shard")
package.__path__ = [sys.argv[1]]
from lightning_shard.elastic.membership.rendezvous_server import main
main(sys.argv[2:])
"""
_PACKAGE_FOLDER = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class JobRules(Bounds):
    """What a job's membership table goes by, beside its bounds."""

    initial_size: int
    timeout_seconds: float = 1800.0

    @property
    def silence_seconds(self) -> float:
        """How long a participant may say nothing before it is declared dead."""
        return 0.7 * self.timeout_seconds

    @property
    def tick_seconds(self) -> float:
        """How many seconds lie between two heartbeats, of participants and of the server."""
        return min(self.timeout_seconds / 10, _LONGEST_TICK_SECONDS)


class RendezvousServer(Served):
    """Serves a `MembershipTable` and the job's store behind one door."""

    def __init__(self, rules: JobRules, listeners: Sequence[socket.socket], token: str) -> None:
        self._loop = Loop("lightning-shard-rendezvous")
        super().__init__(self._loop.selector)
        self._rules = rules
        services = {MEMBER: self, STORE: KeyValueService(self._selector)}
        serve_behind_door(self._loop, listeners, token, services)
        self._told_early: list[Message] = []
        self.membership_table = MembershipTable(
            rules,
            initial_size=rules.initial_size,
            silence_seconds=rules.silence_seconds,
            tell=self._tell,
            now=monotonic(),
        )

    def run(self) -> None:
        """Serve until the last participant has gone, for good; then close every socket."""
        alone_since = now = monotonic()
        has_begun = False
        try:
            while now - alone_since < self._linger_seconds(has_begun):
                self._loop.turn()
                now = monotonic()
                if self._owners:
                    alone_since, has_begun = now, True
        finally:
            self._loop.forget()

    def _linger_seconds(self, has_begun: bool) -> float:
        if self.membership_table.is_over:
            return 0.0
        return _LINGER_SECONDS if has_begun else 2 * SHORTEST_START_SECONDS

    @property
    @override
    def tick_seconds(self) -> float:
        return self._rules.tick_seconds

    @override
    def tick(self, now: float, seconds: float) -> None:
        if seconds > self._rules.silence_seconds / 2:  # this process was stopped
            self.membership_table.forgive(now)
        self.membership_table.tick(now)
        for connection, member in self._owners.items():
            if member is not None:
                connection.send({"kind": "beat"})

    @override
    def _take(self, connection: Connection, message: Message) -> bool:
        """Hand a message to the table; return whether it was one of a participant."""
        now, member, table = monotonic(), self._owners[connection], self.membership_table
        if message["kind"] == "join":
            self._join(connection, message, now)
            return True
        if member is None:
            return False
        match message["kind"]:
            case "beat":
                table.beat(member, now)
            case "arrive":
                table.arrive(member, message["generation"], message["error"], now)
            case "ready":
                table.ready(member, message["generation"], now)
            case "leave":
                table.leave(member, message["is_done"], now)
        return True

    def _join(self, connection: Connection, message: Message, now: float) -> None:
        name, rank = str(message["name"]), message["initial_rank"]
        rank = None if rank is None else int(rank)
        if (before := self._owners[connection]) is not None:
            del self._connections[before]  # was declared dead, and comes again
            self.membership_table.lost(before, now)
        member = self.membership_table.join(name, rank, now)
        self._know(connection, member)
        size = self._rules.initial_size
        connection.send({"kind": "joined", "member": member, "first_size": size})
        for early in self._told_early:
            connection.send(early)
        self._told_early.clear()

    @override
    def _lost(self, connection: Connection, owner: Any) -> None:
        if owner is not None:
            self.membership_table.lost(owner, monotonic())

    @override
    def _tell(self, owner: Any, message: Message) -> None:
        """Send to a participant; one unknown here is the one that just joins, or is gone."""
        super()._tell(owner, message)
        if owner not in self._connections and self.membership_table.is_there(owner):
            self._told_early.append(message)


def start_rendezvous_server(rules: JobRules, host: str, port: int, token: str = "") -> settings.Job:
    """Start a rendezvous server on this host in a session of its own, which ends by itself."""
    listeners = listen(host, port)
    with contextlib.ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        port = int(listeners[0].getsockname()[1])
        if not token:
            token = find_token(port, on_one_host=settings.is_loopback(host), rank=0)
        _start_process(rules, [listener.fileno() for listener in listeners], token)
        return settings.Job(host=host, port=port, token=token)


def _start_process(rules: JobRules, handed: list[int], token: str) -> None:
    starting = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(_PACKAGE_FOLDER), *map(str, handed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=handed,
        start_new_session=True,  # Ctrl-C is for the ranks
    )
    assert starting.stdin is not None
    with starting.stdin as told:  # no argument, which other users of the host could read
        told.write(json.dumps({"rules": asdict(rules), "token": token}).encode())
    if status := starting.wait():
        raise BackendUnavailableError(
            f"The elastic job's rendezvous server could not be started: {sys.executable} ended "
            f"with status {status}; its own output says why."
        )


def main(descriptors: list[str]) -> None:
    """Serve one job over listening sockets, whose numbers these are; standard input says which."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.load(sys.stdin)
    listeners = [socket.socket(fileno=int(number)) for number in descriptors]
    RendezvousServer(JobRules(**told["rules"]), listeners, told["token"]).run()
