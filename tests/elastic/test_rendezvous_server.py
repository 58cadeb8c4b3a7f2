"""The server's sockets: who may come in, who is told what, when it ends."""

import json
import os
import socket
from contextlib import closing
from datetime import timedelta

import pytest

from lightning_shard.backends._c10d import TCPStore
from lightning_shard.elastic.rendezvous_server import JobRules, start_rendezvous_server
from lightning_shard.settings import Job
from tests.elastic.rendezvous_servers import TOKEN, RunningServer, running_server, wait_until

RULES = JobRules(initial_size=2, timeout_seconds=30.0)


class Participant:
    """A participant that says what it is told to."""

    def __init__(self, server: RunningServer) -> None:
        address = (server.job.host, server.job.port)
        self.stream = socket.create_connection(address, timeout=60)
        self._lines = self.stream.makefile("rb")

    def say(self, **message: object) -> None:
        self.stream.sendall(json.dumps(message).encode() + b"\n")

    def join(self, initial_rank: int | None, token: str = TOKEN, name: str = "m") -> None:
        self.say(kind="join", token=token, name=name, initial_rank=initial_rank)

    def hear(self) -> dict[str, object]:
        """Return the next message that is no beat; `{}` at the end."""
        for line in self._lines:
            message: dict[str, object] = json.loads(line)
            if message["kind"] != "beat":
                return message
        return {}

    def close(self) -> None:
        self._lines.close()
        self.stream.close()


def test_two_ranks_join_and_are_told_of_the_first_generation() -> None:
    with (
        running_server(RULES) as server,
        closing(Participant(server)) as one,
        closing(Participant(server)) as zero,
    ):
        one.join(1)
        joined = {"kind": "joined", "member": "m", "store_port": server.store.port, "first_size": 2}
        assert one.hear() == joined
        zero.join(0)
        assert zero.hear() == joined | {"member": "m/2"}
        for participant in (zero, one):
            assert participant.hear() == {
                "kind": "generation",
                "number": 1,
                "members": ["m/2", "m"],
                "is_last": False,
                "reason": "",
            }
        zero.close()
        lost = one.hear()
        assert (lost["kind"], lost["rank"], lost["event"]) == ("lost", 0, "died")
        one.say(kind="arrive", generation=1, error=None)
        assert one.hear()["members"] == ["m"]
        one.say(kind="leave", is_done=True)


@pytest.mark.parametrize(
    "said",
    [
        b'{"kind": "join", "name": "x", "initial_rank": 0, "token": "wrong"}\n',
        b'{"kind": "join", "name": "x", "initial_rank": 0}\n',
        b'{"kind": "leave", "is_done": true}\n',
        b"GET / HTTP/1.1\n",
        b"[1]\n",
    ],
)
def test_strangers_are_shown_out(said: bytes) -> None:
    with (
        running_server(JobRules(initial_size=1, timeout_seconds=30.0)) as server,
        closing(Participant(server)) as member,
        closing(Participant(server)) as stranger,
    ):
        member.join(0)
        member.hear()
        stranger.stream.sendall(said)
        assert stranger.hear() == {}
        assert member.hear()["members"] == ["m"]
        member.say(kind="leave", is_done=True)


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "arrive"},
        {"kind": "join", "token": TOKEN, "name": "m", "initial_rank": "first"},
        {"kind": "leave"},
    ],
)
def test_a_participant_that_talks_nonsense_is_lost_and_the_others_go_on(
    said: dict[str, object],
) -> None:
    with (
        running_server(RULES) as server,
        closing(Participant(server)) as zero,
        closing(Participant(server)) as one,
    ):
        zero.join(0)
        one.join(1)
        assert [zero.hear()["kind"] for _ in range(2)] == ["joined", "generation"]
        one.say(**said)
        assert zero.hear()["kind"] == "lost"
        zero.say(kind="leave", is_done=True)


def test_a_declared_dead_participant_joins_again_over_the_same_connection() -> None:
    rules = JobRules(initial_size=1, timeout_seconds=1.0)
    with running_server(rules) as server, closing(Participant(server)) as member:
        member.join(0)
        kinds = [member.hear()["kind"] for _ in range(3)]  # beats nothing meanwhile
        assert kinds == ["joined", "generation", "declared_dead"]
        member.join(None)
        assert member.hear()["member"] == "m/2"
        member.say(kind="arrive", generation=0, error=None)
        assert member.hear()["members"] == ["m/2"]
        member.say(kind="leave", is_done=True)


@pytest.mark.slow
def test_a_server_process_serves_and_ends_with_its_last_participant() -> None:
    job = start_rendezvous_server(
        JobRules(initial_size=1, timeout_seconds=60.0), "127.0.0.1", 0, TOKEN
    )
    with socket.create_connection((job.host, job.port), timeout=60) as stream:
        lines = stream.makefile("rb")
        joining = {"kind": "join", "token": TOKEN, "name": "m", "initial_rank": 0}
        stream.sendall(json.dumps(joining).encode() + b"\n")
        port = json.loads(lines.readline())["store_port"]
        store = TCPStore(job.host, port, None, False, timedelta(seconds=60))
        store.set("key", str(os.getpid()))
        assert store.get("key") == str(os.getpid()).encode()
        stream.sendall(json.dumps({"kind": "leave", "is_done": True}).encode() + b"\n")
        while lines.readline():
            pass  # until the server closes its end
        lines.close()
    wait_until(lambda: not answers(job))


def answers(job: Job) -> bool:
    try:
        socket.create_connection((job.host, job.port), timeout=1).close()
    except OSError:  # refused or reset, as the system likes
        return False
    return True
