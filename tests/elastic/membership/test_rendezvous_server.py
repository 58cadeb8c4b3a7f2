"""The server's sockets: who may come in, who is told what, when it ends."""

import contextlib
import os
import select
import socket
from contextlib import closing
from datetime import timedelta

import pytest

from lightning_shard.backends.authentication.connection import Message, connect
from lightning_shard.backends.authentication.store import JobStore
from lightning_shard.backends.authentication.token import JobAddress
from lightning_shard.core.settings import Job
from lightning_shard.elastic.membership.rendezvous_server import (
    MEMBER,
    JobRules,
    start_rendezvous_server,
)
from tests.elastic.rendezvous_servers import TOKEN, running_server, wait_until

RULES = JobRules(initial_size=2, timeout_seconds=30.0)


class Participant:
    """A participant that says what it is told to."""

    def __init__(self, job: Job) -> None:
        self._connection = connect(
            JobAddress(host=job.host, port=job.port, token=job.token), MEMBER, 60
        )
        self._heard: list[Message] = []

    def say(self, **message: object) -> None:
        self._connection.send(message)

    def join(self, initial_rank: int | None, name: str = "m") -> None:
        self.say(kind="join", name=name, initial_rank=initial_rank)

    def hear(self) -> Message:
        """Return the next message that is no beat; `{}` at the end."""
        while not self._heard and self._connection.is_open:
            select.select([self._connection], [], [], 60)
            heard = self._connection.receive()
            self._heard += [message for message in heard if message["kind"] != "beat"]
        return self._heard.pop(0) if self._heard else {}

    def close(self) -> None:
        self._connection.close()


def test_two_ranks_join_and_are_told_of_the_first_generation() -> None:
    with (
        running_server(RULES) as server,
        closing(Participant(server.job)) as one,
        closing(Participant(server.job)) as zero,
    ):
        one.join(1)
        joined = {"kind": "joined", "member": "m", "first_size": 2}
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
        b'{"nonce": "0", "service": "member", "proof": "wrong"}\n',
        b'{"kind": "join", "name": "x", "initial_rank": 0}\n',
        b'{"kind": "leave", "is_done": true}\n',
        b"GET / HTTP/1.1\n",
        b"[1]\n",
    ],
)
def test_strangers_are_shown_out(said: bytes) -> None:
    with (
        running_server(JobRules(initial_size=1, timeout_seconds=30.0)) as server,
        closing(Participant(server.job)) as member,
        socket.create_connection((server.job.host, server.job.port), timeout=60) as stranger,
    ):
        member.join(0)
        member.hear()
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 12):
                pass
        assert member.hear()["members"] == ["m"]
        member.say(kind="leave", is_done=True)


@pytest.mark.parametrize(
    "said",
    [{"kind": "arrive"}, {"kind": "join", "name": "m", "initial_rank": "first"}, {"kind": "leave"}],
)
def test_a_participant_that_talks_nonsense_is_lost_and_the_others_go_on(
    said: dict[str, object],
) -> None:
    with (
        running_server(RULES) as server,
        closing(Participant(server.job)) as zero,
        closing(Participant(server.job)) as one,
    ):
        zero.join(0)
        one.join(1)
        assert [zero.hear()["kind"] for _ in range(2)] == ["joined", "generation"]
        one.say(**said)
        assert zero.hear()["kind"] == "lost"
        zero.say(kind="leave", is_done=True)


def test_a_declared_dead_participant_joins_again_over_the_same_connection() -> None:
    rules = JobRules(initial_size=1, timeout_seconds=1.0)
    with running_server(rules) as server, closing(Participant(server.job)) as member:
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
    with closing(Participant(job)) as member:
        member.join(0)
        assert member.hear()["kind"] == "joined"
        address = JobAddress(host=job.host, port=job.port, token=TOKEN)
        store = JobStore(address, timedelta(seconds=60))
        store.set("key", str(os.getpid()))
        assert store.get("key") == str(os.getpid()).encode()
        store.forget()
        member.say(kind="leave", is_done=True)
        while member.hear():
            pass  # until the server closes its end
    wait_until(lambda: not answers(job))


def answers(job: Job) -> bool:
    try:
        socket.create_connection((job.host, job.port), timeout=1).close()
    except OSError:  # refused or reset, as the system likes
        return False
    return True
