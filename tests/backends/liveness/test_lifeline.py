"""One rank's end of the lifeline, with the hub's words put into its ear; the file of a time-out."""

import contextlib
import os
import re
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from lightning_shard.backends import liveness
from lightning_shard.backends.authentication.connection import Connection, Message
from lightning_shard.backends.authentication.loop import Loop
from lightning_shard.backends.liveness.lifeline import KEPT, Lifeline
from lightning_shard.backends.liveness.server import NO_STEP
from lightning_shard.backends.liveness.thread import KeptConnection
from lightning_shard.errors import RankFailedError
from tests.processes import run_processes
from tests.strategies.models import TiedLSTM
from tests.strategies.parity import (
    STRATEGIES,
    GlobalBatches,
    ignore_upstream_warnings,
    quiet_trainer,
)

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


def test_a_beat_of_one_that_waits_for_long_names_the_users_line(rank: Rank) -> None:
    rank.lifeline.entered("all_reduce")
    rank.lifeline._activity = rank.lifeline._activity._replace(since=monotonic() - 6)
    rank.lifeline.beat()
    assert f"s at {__file__}:" in rank.sent[0]["doing"]
    assert rank.sent[0]["waits"] == pytest.approx(6, abs=5)


@pytest.mark.parametrize("event", [f"{NO_STEP} in time", "died"])
def test_a_rank_that_does_not_hear_of_a_verdict_is_ended(
    event: str, rank: Rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It sleeps in its own code, where no error reaches it, and stayed when the others had gone."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    rank.told(kind="verdict", rank=0, event=event, doing="it was computing")
    now = monotonic()
    rank.lifeline.tick(now)
    assert statuses == []
    rank.lifeline.tick(now + 60)
    assert statuses == [1]
    assert "[rank 2] has not heard of it, and is ended" in capfd.readouterr().err
    with pytest.raises(RankFailedError):
        rank.lifeline.check("all_reduce")
    rank.lifeline.tick(now + 60)
    assert statuses == [1]


def test_a_rank_of_which_another_thread_alone_hears_of_a_verdict_is_ended(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread of `async_sgd` heard of it, and its rank stayed in its own code, alone."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    rank.told(kind="verdict", rank=0, event=f"{NO_STEP} in time", doing="it was computing")
    with ThreadPoolExecutor() as pool:
        assert isinstance(pool.submit(rank.lifeline.explain, "recv").result(), RankFailedError)
        with pytest.raises(RankFailedError):
            pool.submit(rank.lifeline.check, "recv").result()
    rank.lifeline.tick(monotonic() + 60)
    assert statuses == [1]
    assert "[rank 2] has not heard of it, and is ended" in capfd.readouterr().err


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
    rank.lifeline.server_lost("died")
    assert rank.interruptions == ["all"]
    with pytest.raises(RankFailedError, match="rank 1 died"):
        rank.lifeline.check("barrier")


def test_the_hubs_end_is_rank_0s(rank: Rank) -> None:
    rank.lifeline.server_lost("died")
    with pytest.raises(RankFailedError, match="lost a peer in send: rank 0 died"):
        rank.lifeline.check("send")


def test_the_hubs_silence_is_rank_0s(rank: Rank) -> None:
    ours, hub = socket.socketpair()
    kept, thread = KeptConnection(Connection(ours), 8 / 0.7, heard=0.0), Loop("test")
    with contextlib.closing(hub), contextlib.closing(kept):
        kept.keep(thread, rank.lifeline)
        kept.tick(8.0, 1.0)
        rank.lifeline.check("send")
        kept.tick(20.0, 12.0)  # this process itself was stopped
        rank.lifeline.check("send")
        kept.tick(28.5, 1.0)
        with pytest.raises(RankFailedError, match=r"rank 0 fell silent for 8\.5 s"):
            rank.lifeline.check("send")
    thread.end()


def test_the_hubs_goodbye_is_no_failure(rank: Rank) -> None:
    rank.told(kind="bye")
    rank.lifeline.server_lost("died")
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


def test_an_error_without_words_is_quoted_by_its_type(rank: Rank) -> None:
    """An error without words was quoted with a lonely colon."""
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
    kinds = [message["kind"] for message in rank.sent]
    assert kinds == ["hold", "stopped"]  # all have stopped: no failure


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


@pytest.fixture
def lifeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lifeline:
    """Rank 2 of 3, which has done more than it remembers and waits in an all_gather."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Lifeline(
        rank=2,
        world_size=3,
        silence_seconds=8.0,
        send=lambda message: None,
        interrupt=lambda: None,
        now=0.0,
    )
    for _ in range(KEPT):
        made.entered("all_reduce")
        made.left()
    made.entered("all_gather")
    return made


def verdict(event: str) -> dict[str, Any]:
    return {"kind": "verdict", "rank": 1, "event": event, "doing": "it was computing for 9.0 s"}


def written(message: str, rank: int = 2) -> Path:
    found = re.search(rf"Where rank {rank} was stands in (\S+\.txt)\.", message)
    assert found is not None, message
    return Path(found[1])


@pytest.mark.parametrize("event", ["fell silent for 8.1 s", "raised RankFailedError: too late"])
def test_a_verdict_about_a_time_out_names_the_file(event: str, lifeline: Lifeline) -> None:
    lifeline.heard(verdict(event), 1.0)
    with pytest.raises(RankFailedError) as caught:
        lifeline.check("all_gather")
    lines = written(str(caught.value)).read_text().splitlines()
    assert lines[0].startswith("rank 2 of 3, process ")
    assert event in lines[0]
    operations = [line for line in lines if "(its operation" in line]
    assert len(operations) == KEPT
    assert operations[-1].endswith(f"began all_gather (its operation {KEPT + 1})")
    assert operations[-2].endswith(f"ended all_reduce (its operation {KEPT})")
    assert "Thread MainThread, most recent call last:" in lines
    assert any("test_a_verdict_about_a_time_out_names_the_file" in line for line in lines)


def test_a_time_out_of_the_transport_names_the_file_once(
    lifeline: Lifeline, tmp_path: Path
) -> None:
    first = str(lifeline.explain("all_gather", wait_seconds=0.0))
    assert "has not come in time" in first
    assert "all_gather was not finished in time" in written(first).read_text()
    assert written(str(lifeline.explain("all_gather", wait_seconds=0.0))) == written(first)
    assert len(list(tmp_path.glob("lightning-shard-rank-2-*.txt"))) == 1


@pytest.mark.parametrize("event", ["died", "received SIGTERM", "raised ValueError: no"])
def test_other_ends_write_nothing(event: str, lifeline: Lifeline, tmp_path: Path) -> None:
    lifeline.heard(verdict(event), 1.0)
    with pytest.raises(RankFailedError) as caught:
        lifeline.check("all_gather")
    assert "stands in" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_changes_nothing_else(
    lifeline: Lifeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    lifeline.heard(verdict("fell silent for 8.1 s"), 1.0)
    with pytest.raises(RankFailedError, match="rank 1 fell silent") as caught:
        lifeline.check("all_gather")
    assert "stands in" not in str(caught.value)


class Straggler(TiedLSTM):
    """Rank 1 computes in its second step until the others have given it up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 1:
            self.compute_for_long()
        return super().training_step(batch, batch_idx)

    def compute_for_long(self) -> None:
        lifeline = liveness.current()
        assert lifeline is not None
        while not lifeline.has_verdict:
            sum(range(100_000))
        lifeline.check("the next batch")


def fit(folder: Path) -> str:
    ignore_upstream_warnings()
    tempfile.tempdir = str(folder)
    strategy = STRATEGIES["zero2"](backend="gloo", timeout=timedelta(seconds=3))
    model = Straggler()
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=3, accumulate_grad_batches=1)
    try:
        trainer.fit(model, datamodule=GlobalBatches(model, 3))
    except RankFailedError as error:
        return str(error)
    raise AssertionError("nobody was missed")


@pytest.mark.slow
def test_the_rank_that_others_wait_for_writes_where_it_is(tmp_path: Path) -> None:
    waited, computed = run_processes(fit, 2, folder=tmp_path)
    assert "in compute_for_long" in written(computed, 1).read_text()
    assert "in compute_for_long" not in written(waited, 0).read_text()
    assert "began " in written(waited, 0).read_text()
