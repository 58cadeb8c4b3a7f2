"""Handles, and which transport errors are about a lost peer."""

from datetime import timedelta
from time import monotonic

import pytest
import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.pending import OperationContext, Pending, Span, StartedTransfer
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.call_site import reading
from lightning_shard.errors import DeadlockError, RankFailedError


def place() -> OperationContext:
    return OperationContext(operation="all_gather", rank=1, size=4, traffic=Traffic())


def test_finish_runs_once() -> None:
    finished: list[str] = []
    pending = Pending(StartedTransfer(finish=lambda: finished.append("once")), place())
    assert not pending.done
    pending.wait()
    pending.wait()
    assert pending.done
    assert finished == ["once"]


def test_waiting_is_charged_to_the_operation() -> None:
    here = place()
    Pending(StartedTransfer(), here).wait()
    assert here.traffic["all_gather"].seconds > 0


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
        "[127.0.0.1]:4242",
        "Read error [127.0.0.1]:1: Connection reset by peer",
        "Timed out waiting 1000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error",
    ],
)
def test_a_lost_peer(text: str) -> None:
    with pytest.raises(RankFailedError) as caught, Span(place()):
        raise RuntimeError(text)
    assert str(caught.value).startswith("Rank 1 of 4 lost a peer in all_gather")
    assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_rank_that_reads_alone_says_so_where_another_has_died_of_it() -> None:
    """Gloo ended the other rank, which had got what it did not expect, and nothing told why."""
    told = pytest.raises(RankFailedError, match=r"called it at .*test_pending.py.* to read 'head'")
    with told, reading("head"), Span(place()):
        raise RuntimeError("Connection closed by peer")


def test_errors_of_c10d_itself_are_about_peers() -> None:
    with pytest.raises(RankFailedError), Span(place()):
        raise dist.DistBackendError("anything")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Invalid scalar type"),
        RuntimeError("DataLoader timed out after 5 seconds"),  # was laid to a peer's charge
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        DeadlockError("timed out"),
        ValueError("x"),
    ],
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, Span(place()):
        raise error
    assert caught.value is error


def test_a_failed_wait_stays_undone() -> None:
    class Lost(dist.Work):
        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            raise RuntimeError("Connection closed by peer")

    pending = Pending(StartedTransfer(works=[Lost()]), place())
    for _ in range(2):
        with pytest.raises(RankFailedError):
            pending.wait()
        assert not pending.done


@pytest.fixture
def lifeline(monkeypatch: pytest.MonkeyPatch) -> Lifeline:
    lifeline = Lifeline(
        rank=1,
        world_size=4,
        silence_seconds=60.0,
        send=lambda message: None,
        interrupt=lambda: None,
        now=monotonic(),
    )
    monkeypatch.setattr(liveness, "current", lambda: lifeline)
    return lifeline


def judge(lifeline: Lifeline) -> None:
    verdict = {"kind": "verdict", "rank": 3, "event": "died", "doing": "it was in barrier"}
    lifeline.heard(verdict, monotonic())


def test_no_operation_starts_after_a_verdict(lifeline: Lifeline) -> None:
    judge(lifeline)
    with pytest.raises(RankFailedError, match="in all_gather: rank 3 died"), Span(place()):
        raise AssertionError("started")


def test_a_transports_error_is_explained_by_the_verdict(lifeline: Lifeline) -> None:
    def fail() -> None:
        judge(lifeline)
        raise RuntimeError("Application timeout caused pair closure")

    with pytest.raises(RankFailedError) as caught, Span(place()):
        fail()
    assert "lost a peer in all_gather: rank 3 died" in str(caught.value)
    assert "The transport said: Application timeout" in str(caught.value)
