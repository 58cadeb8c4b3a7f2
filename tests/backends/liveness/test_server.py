"""The hub's verdicts and agreements, without sockets and without time passing."""

from typing import Any

import pytest

from lightning_shard.backends.authentication.connection import Message
from lightning_shard.backends.liveness.server import LONGEST_WAIT_SECONDS, Hub


class Room:
    """A hub of three ranks and all that it has said."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Message]] = []
        self.hub = Hub(3, 8.0, lambda rank, message: self.said.append((rank, message)), 0.0)
        for rank in range(3):
            self.hub.heard(rank, {"kind": "join"}, 0.0)

    def said_to(self, rank: int, kind: str) -> list[Message]:
        return [message for to, message in self.said if to == rank and message["kind"] == kind]

    @property
    def verdicts(self) -> set[tuple[int, str]]:
        return {(m["rank"], m["event"]) for _, m in self.said if m["kind"] == "verdict"}


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_connection_that_ends_is_a_death_that_all_are_told_of(room: Room) -> None:
    room.hub.heard(1, {"kind": "beat", "doing": "in all_reduce"}, 1.0)
    room.hub.lost(1, 1.5)
    expected = {
        "kind": "verdict",
        "rank": 1,
        "event": "died",
        "doing": "it was in all_reduce, 0.5 s ago",
    }
    assert [room.said_to(rank, "verdict") for rank in range(3)] == [[expected]] * 3


def test_a_goodbye_is_no_death(room: Room) -> None:
    room.hub.heard(1, {"kind": "bye"}, 1.0)
    room.hub.lost(1, 1.0)
    room.hub.heard(0, {"kind": "beat", "doing": "computing"}, 20.0)
    room.hub.heard(2, {"kind": "beat", "doing": "computing"}, 20.0)
    room.hub.tick(20.0)
    assert room.verdicts == set()
    assert room.hub.table(20.0)["1"] == "had left in order"


def test_silence(room: Room) -> None:
    for rank in (0, 2):
        room.hub.heard(rank, {"kind": "beat", "doing": "in barrier"}, 8.0)
    room.hub.tick(8.0)
    assert room.verdicts == set()
    room.hub.tick(8.5)
    assert room.verdicts == {(1, "fell silent for 8.5 s")}


def test_a_pause_of_the_hub_itself_is_nobodys_silence(room: Room) -> None:
    room.hub.forgive(100.0)
    room.hub.tick(101.0)
    assert room.verdicts == set()


def test_all_are_welcomed_once_the_last_has_come() -> None:
    said: list[tuple[int, Message]] = []
    hub = Hub(2, 8.0, lambda rank, message: said.append((rank, message)), 0.0)
    hub.heard(1, {"kind": "join"}, 0.1)
    assert said == []
    hub.heard(0, {"kind": "join"}, 0.2)
    assert said == [(0, {"kind": "welcome"}), (1, {"kind": "welcome"})]


def test_a_rank_that_never_came_is_silent() -> None:
    said: list[Message] = []
    hub = Hub(2, 8.0, lambda rank, message: said.append(message), 0.0)
    hub.heard(0, {"kind": "join"}, 8.5)
    hub.tick(8.5)
    verdicts = [message for message in said if message["kind"] == "verdict"]
    assert (verdicts[0]["rank"], verdicts[0]["doing"]) == (1, "it had not come yet, 8.5 s ago")


def test_the_first_verdict_stands(room: Room) -> None:
    room.hub.heard(2, {"kind": "failed", "event": "raised ValueError: x"}, 1.0)
    room.hub.lost(2, 1.1)
    room.hub.lost(1, 1.2)
    assert room.verdicts == {(2, "raised ValueError: x")}


def test_who_comes_late_is_told_what_was_announced(room: Room) -> None:
    room.hub.lost(1, 1.0)
    room.said.clear()
    room.hub.heard(2, {"kind": "join"}, 1.1)
    assert [message["rank"] for message in room.said_to(2, "verdict")] == [1]


def test_a_question_is_answered_with_what_each_rank_does(room: Room) -> None:
    room.hub.heard(2, {"kind": "beat", "doing": "computing for 12.0 s"}, 1.0)
    room.hub.heard(0, {"kind": "ask"}, 3.0)
    [answer] = room.said_to(0, "table")
    assert answer["table"]["2"] == "was computing for 12.0 s, 2.0 s ago"


@pytest.mark.parametrize(("steps", "stop"), [((7, 7, 7), 8), ((7, 9, 8), 10), ((0, 0, 0), 1)])
def test_all_stop_where_the_foremost_will_be(
    room: Room, steps: tuple[int, int, int], stop: int
) -> None:
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    room.hub.heard(2, {"kind": "terminating"}, 1.0)
    assert [len(room.said_to(rank, "hold")) for rank in range(3)] == [1, 1, 1]
    for rank, count in enumerate(steps):
        assert not room.said_to(rank, "stop")
        room.hub.heard(rank, {"kind": "hold", "steps": count}, 1.0)
    for rank in range(3):
        assert room.said_to(rank, "stop") == [{"kind": "stop", "rank": 1, "step": stop}]
    assert room.verdicts == set()


def test_ranks_that_stop_are_told_whether_slurm_requeues_the_job(room: Room) -> None:
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    room.hub.heard(2, {"kind": "terminating", "requeues": True}, 1.0)
    room.hub.heard(0, {"kind": "terminating", "requeues": True}, 1.0)
    for rank in range(3):
        room.hub.heard(rank, {"kind": "hold", "steps": 4}, 1.0)
    stop = {"kind": "stop", "rank": 1, "step": 5, "requeues": True}
    assert [room.said_to(rank, "stop") for rank in range(3)] == [[stop]] * 3


def test_who_has_left_need_not_agree(room: Room) -> None:
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    for rank in (0, 1):
        room.hub.heard(rank, {"kind": "hold", "steps": 4}, 1.0)
    room.hub.heard(2, {"kind": "bye"}, 1.0)
    stop: dict[str, Any] = {"kind": "stop", "rank": 1, "step": 5}
    assert [room.said_to(rank, "stop") for rank in range(3)] == [[stop], [stop], []]


def test_a_rank_that_was_terminated_and_then_killed(room: Room) -> None:
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    room.hub.lost(1, 1.1)
    assert room.verdicts == {(1, "died after SIGTERM")}


def raised(room: Room, rank: int, now: float, place: int = 7, number: int = 5) -> None:
    message = {"kind": "raised", "event": "raised E: no", "place": place, "number": number}
    room.hub.heard(rank, message, now)


def test_ranks_that_raise_at_one_place_are_told_that_they_have_it_in_common(
    room: Room,
) -> None:
    """Ranks that raised at one place were each told that the first had failed."""
    for rank in range(3):
        raised(room, rank, 1.0 + rank)
    assert [room.said_to(rank, "common") for rank in range(3)] == [[{"kind": "common"}]] * 3
    assert [room.said_to(rank, "raised")[0]["number"] for rank in range(3)] == [5] * 3
    room.hub.heard(1, {"kind": "past"}, 4.0)
    room.hub.tick(60.0)
    assert not any(event.startswith("raised") for _, event in room.verdicts)


def test_a_rank_that_waits_past_the_place_makes_the_verdict_at_once(room: Room) -> None:
    raised(room, 1, 1.0)
    assert room.verdicts == set()
    room.hub.heard(0, {"kind": "past"}, 1.1)
    assert room.verdicts == {(1, "raised E: no")}


def test_ranks_that_raised_at_different_places_have_failed_apart(room: Room) -> None:
    raised(room, 2, 1.0)
    raised(room, 0, 1.1, place=8)
    assert room.verdicts == {(2, "raised E: no")}


def test_nobody_waits_for_long_for_others_to_raise(room: Room) -> None:
    raised(room, 2, 1.0)
    room.hub.tick(1.0 + LONGEST_WAIT_SECONDS)
    assert room.verdicts == set()
    room.hub.tick(1.1 + LONGEST_WAIT_SECONDS)
    assert room.verdicts == {(2, "raised E: no")}


def test_a_rank_many_steps_in_is_not_said_to_be_before_its_first_operation(room: Room) -> None:
    """A rank many steps in was said to be before its first operation."""
    doing = "computing for 0.0 s before its first operation"
    room.hub.heard(1, {"kind": "beat", "doing": doing}, 1.0)
    assert room.hub.table(1.5)["1"] == f"was {doing}, 0.5 s ago"
    assert "first operation" not in room.hub.table(5.0)["1"]


def doing(room: Room, rank: int, now: float, waits: float) -> None:
    message = {"kind": "beat", "doing": f"in all_reduce for {waits:.1f} s", "waits": waits}
    room.hub.heard(rank, message, now)


def test_a_next_step_that_does_not_come_in_time_ends_the_job(room: Room) -> None:
    """Ranks that waited for each other were told to stop at the next step, and that was all."""
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    for now in (10.0, 20.0, 30.5):
        doing(room, 0, now, 0.0)
        doing(room, 2, now, now)
        room.hub.heard(1, {"kind": "stopped"}, now)
        room.hub.tick(now)
    assert room.verdicts == set()
    room.hub.tick(31.5)
    assert room.verdicts == {(0, "came to no next step within 30 s after rank 1 received SIGTERM")}
    [verdict] = room.said_to(2, "verdict")
    assert "; rank 2 was in all_reduce for 30.5 s" in verdict["doing"]


def test_who_has_stopped_may_save_for_as_long_as_it_takes(room: Room) -> None:
    room.hub.heard(1, {"kind": "terminating"}, 1.0)
    for now in (2.0, 9.0, 16.0, 23.0, 30.0, 37.0):
        for rank in range(3):
            room.hub.heard(rank, {"kind": "stopped"}, now)
        room.hub.tick(now)
    assert room.verdicts == set()


def test_slurms_signal_leaves_the_time_that_it_was_asked_for(room: Room) -> None:
    room.hub.heard(1, {"kind": "terminating", "requeues": True}, 1.0)
    for now in (8.0, 16.0, 24.0, 32.0, 40.0):
        for rank in range(3):
            doing(room, rank, now, 0.0)
        room.hub.tick(now)
    assert room.verdicts == set()


def test_who_waits_for_what_is_told_while_they_wait(room: Room) -> None:
    """Of a hang nothing was said before the time-out, which is half an hour by default."""
    for now in (5.0, 12.0, 19.0, 26.0, 33.0, 40.0, 47.0):
        doing(room, 0, now, 0.0)
        for rank in (1, 2):
            doing(room, rank, now, now)
        room.hub.tick(now)
    first, second = (message["ranks"] for message in room.said_to(0, "waiting"))
    assert first[1] == "rank 1 was in all_reduce for 26.0 s, 0.0 s ago"
    assert second[2] == "rank 2 was in all_reduce for 47.0 s, 0.0 s ago"
    assert room.said_to(1, "waiting") == []
