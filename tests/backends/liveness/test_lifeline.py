"""One rank's end of the lifeline, with the hub's words put into its ear."""

import threading
from typing import Any

import pytest

from lightning_shard.backends.guarded.connection import Message
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.errors import RankFailedError

VERDICT = {"kind": "verdict", "rank": 1, "event": "died", "doing": "it was in all_reduce"}


class Rank:
    """Rank 2 of 3, and what it has sent and interrupted."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.interruptions: list[str] = []
        self.lifeline = Lifeline(
            rank=2,
            world_size=3,
            silence_seconds=8.0,
            send=self.sent.append,
            interrupt=lambda: self.interruptions.append("all"),
            now=0.0,
        )

    def told(self, **message: Any) -> None:
        self.lifeline.heard(message, 1.0)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_nothing_happens_while_all_are_well(rank: Rank) -> None:
    rank.lifeline.check("all_reduce")
    rank.lifeline.entered("all_reduce")
    rank.lifeline.left()
    assert not rank.lifeline.step()
    assert rank.sent == []


def test_the_start_waits_for_all(rank: Rank) -> None:
    with pytest.raises(RankFailedError, match="lost a peer in the start"):
        rank.lifeline.await_all(0.0)
    threading.Timer(0.05, rank.told, kwargs={"kind": "welcome"}).start()
    rank.lifeline.await_all(60.0)
    rank.lifeline.heard(VERDICT, 1.0)
    with pytest.raises(RankFailedError, match="rank 1 died"):
        rank.lifeline.await_all(60.0)


def test_a_beat_says_what_the_rank_does(rank: Rank) -> None:
    rank.lifeline.beat()
    rank.lifeline.entered("all_gather")
    rank.lifeline.beat()
    rank.lifeline.left()
    rank.lifeline.beat()
    doing = [message["doing"] for message in rank.sent]
    assert doing[0].startswith("computing for ")
    assert doing[0].endswith(" before its first operation")
    assert doing[1] == "in all_gather (its operation 1) for 0.0 s"
    assert doing[2] == "computing for 0.0 s after all_gather (its operation 1)"


def test_a_verdict_names_the_rank_the_operation_and_what_to_do(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.lifeline.heard(VERDICT, 1.0)
    for call in (rank.lifeline.check, rank.lifeline.entered):
        with pytest.raises(RankFailedError) as caught:
            call("barrier")
        assert str(caught.value) == (
            "Rank 2 of 3 lost a peer in barrier: rank 1 died; it was in all_reduce. Look for the "
            "cause in that rank's output and its host's log (out of memory?); then go on from the "
            "last checkpoint."
        )
    with pytest.raises(RankFailedError, match="lost a peer in the next step: rank 1 died"):
        rank.lifeline.step()
    assert capsys.readouterr().err == "[rank 2] rank 1 died; it was in all_reduce\n"


def test_the_first_verdict_interrupts_once_and_stands(rank: Rank) -> None:
    rank.lifeline.heard(VERDICT, 1.0)
    rank.lifeline.heard(VERDICT | {"rank": 0}, 1.0)
    rank.lifeline.hub_lost()
    assert rank.interruptions == ["all"]
    with pytest.raises(RankFailedError, match="rank 1 died"):
        rank.lifeline.check("barrier")


def test_the_hubs_end_is_rank_0s(rank: Rank) -> None:
    rank.lifeline.hub_lost()
    with pytest.raises(RankFailedError, match="lost a peer in send: rank 0 died"):
        rank.lifeline.check("send")


def test_the_hubs_silence_is_rank_0s(rank: Rank) -> None:
    rank.lifeline.tick(8.0)
    rank.lifeline.check("send")
    rank.lifeline.forgive(20.0)
    rank.lifeline.tick(21.0)
    rank.lifeline.check("send")
    rank.lifeline.tick(28.5)
    with pytest.raises(RankFailedError, match=r"rank 0 fell silent for 8\.5 s"):
        rank.lifeline.check("send")


def test_the_hubs_goodbye_is_no_failure(rank: Rank) -> None:
    rank.told(kind="bye")
    rank.lifeline.hub_lost()
    rank.lifeline.check("send")
    error = rank.lifeline.explain("send", wait_seconds=0.0)
    assert "rank 0 has left in order" in str(error)
    assert rank.interruptions == []


def test_explaining_waits_for_a_verdict_under_way(rank: Rank) -> None:
    threading.Timer(0.05, rank.lifeline.heard, [VERDICT, 1.0]).start()
    error = rank.lifeline.explain("recv", wait_seconds=60.0)
    assert "lost a peer in recv: rank 1 died" in str(error)


def test_without_a_verdict_it_tells_what_the_others_do(rank: Rank) -> None:
    rank.told(kind="table", table={"0": "was in barrier", "1": "was computing", "2": "here"})
    error = str(rank.lifeline.explain("barrier", wait_seconds=0.0))
    assert rank.sent == [{"kind": "ask"}]
    assert "rank 0 was in barrier; rank 1 was computing. Look" in error


def test_a_rank_that_raises_says_so_once(rank: Rank) -> None:
    rank.lifeline.announce_failure(ValueError("too big"))
    rank.lifeline.announce_failure(KeyError("later"))
    assert rank.sent[1:] == [{"kind": "failed", "event": "raised ValueError: too big"}]
    with pytest.raises(RankFailedError, match="this rank itself raised ValueError: too big"):
        rank.lifeline.check("barrier")
    assert rank.interruptions == []


def test_an_error_without_words_was_quoted_with_a_lonely_colon(rank: Rank) -> None:
    rank.lifeline.announce_failure(KeyboardInterrupt())
    assert rank.sent[1:] == [{"kind": "failed", "event": "raised KeyboardInterrupt"}]


def test_a_failure_that_follows_from_a_verdict_is_no_news(rank: Rank) -> None:
    rank.lifeline.heard(VERDICT, 1.0)
    rank.lifeline.announce_failure(RankFailedError("rank 1 died"))
    assert rank.sent == []


def test_a_rank_answers_hold_and_then_waits_before_the_step_after(rank: Rank) -> None:
    for _ in range(5):
        assert not rank.lifeline.step()
    rank.told(kind="hold", rank=1)
    assert rank.sent == [{"kind": "hold", "steps": 5}]
    threading.Timer(0.05, rank.told, kwargs={"kind": "stop", "rank": 1, "step": 7}).start()
    assert not rank.lifeline.step()
    assert rank.lifeline.step()
    assert rank.lifeline.terminated_rank == 1
    rank.lifeline.announce_failure(RankFailedError("stopped"))
    assert len(rank.sent) == 1  # all have stopped: no failure


@pytest.mark.parametrize("release", [VERDICT, {"kind": "bye"}])
def test_nobody_waits_for_ever_for_where_to_stop(rank: Rank, release: Message) -> None:
    rank.told(kind="hold", rank=1)
    threading.Timer(0.05, rank.lifeline.heard, [release, 1.0]).start()
    if release is VERDICT:
        with pytest.raises(RankFailedError):
            rank.lifeline.step()
    else:
        assert not rank.lifeline.step()


def test_a_second_sigterm_is_not_announced_again(rank: Rank) -> None:
    rank.lifeline.announce_termination()
    rank.lifeline.announce_termination()
    assert rank.sent == [{"kind": "terminating"}]


def test_a_second_signal_of_slurms_is_not_announced_again(rank: Rank) -> None:
    rank.lifeline.announce_requeue()
    rank.lifeline.announce_requeue()
    assert rank.sent == [{"kind": "terminating", "requeues": True}]
    assert not rank.lifeline.was_terminated


@pytest.mark.parametrize("more", [{}, {"requeues": True}])
def test_a_rank_is_ending_from_where_all_stop(rank: Rank, more: dict[str, Any]) -> None:
    rank.told(kind="stop", rank=1, step=1, **more)
    assert not rank.lifeline.is_ending
    assert rank.lifeline.step()
    assert rank.lifeline.is_ending
    assert rank.lifeline.requeues == bool(more)


def test_all_have_raised_at_the_same_place(rank: Rank) -> None:
    threading.Timer(0.05, rank.told, kwargs={"kind": "common"}).start()
    assert rank.lifeline.fail(ValueError("no"), 7)
    (said,) = (message for message in rank.sent if message["kind"] == "raised")
    assert said == {"kind": "raised", "event": "raised ValueError: no", "place": 7, "number": 0}
    rank.lifeline.announce_failure(ValueError("no"))  # as the process ends
    assert "failed" not in {message["kind"] for message in rank.sent}


def test_a_rank_that_raises_alone_gets_the_verdict_on_itself(rank: Rank) -> None:
    mine = {"kind": "verdict", "rank": 2, "event": "raised ValueError: no", "doing": "it computed"}
    threading.Timer(0.05, rank.told, kwargs=mine).start()
    assert not rank.lifeline.fail(ValueError("no"), 7)
    assert rank.lifeline.dead_rank is None


def test_who_waits_past_the_place_where_a_peer_has_raised_says_so(rank: Rank) -> None:
    rank.lifeline.entered("all_reduce")
    rank.told(kind="raised", number=1)  # it has entered that, too
    assert rank.sent == []
    rank.lifeline.left()
    rank.lifeline.entered("all_gather")
    assert rank.sent == [{"kind": "past"}]


def test_a_rank_that_has_met_others_anew_is_not_before_its_first_operation() -> None:
    sent: list[Message] = []
    lifeline = Lifeline(
        rank=0,
        world_size=2,
        silence_seconds=8.0,
        send=sent.append,
        interrupt=lambda: None,
        now=0.0,
        met_anew=True,
    )
    lifeline.beat()
    assert sent[0]["doing"].endswith("after meeting anew")
