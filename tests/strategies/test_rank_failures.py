"""A rank of a real training run is lost, and the others say which one and why, in time."""

import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.patience import patient
from tests.strategies.rank_failures import EVERYBODY, End, Training, ends, is_right


def survivors(training: Training, all_ends: list[End]) -> list[End]:
    return [end for end in all_ends if end.rank != training.victim]


def assert_named(training: Training, sent: signal.Signals) -> None:
    for end in survivors(training, ends(training, sent)):
        assert is_right(end, training, sent), end


def test_a_killed_rank_is_named() -> None:
    assert_named(Training(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda sent: sent.name)
def test_a_rank_that_shares_memory_is_named(sent: signal.Signals) -> None:
    assert_named(Training(backend="shm", timeout=6, num_workers=1), sent)


@pytest.mark.slow
def test_a_stopped_rank_is_named_before_the_time_out() -> None:
    assert_named(Training(timeout=6), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda sent: sent.name)
@pytest.mark.parametrize("victim", [0, 2])
def test_any_rank_is_named(victim: int, sent: signal.Signals) -> None:
    assert_named(Training(victim=victim, timeout=6), sent)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_workers_of_a_killed_rank_do_not_hide_its_death(victim: int) -> None:
    """They are forks, which had the rank's sockets open, and live on for some seconds."""
    assert_named(Training(victim=victim, num_workers=1, timeout=5), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_stops_all_at_one_step_where_they_can_save(victim: int, tmp_path: Path) -> None:
    training = Training(victim=victim, saves=True)
    all_ends = ends(training, signal.SIGTERM, tmp_path)
    assert all_ends[victim].error == "SIGTERMException"
    for end in survivors(training, all_ends):
        assert is_right(end, training, signal.SIGTERM), end
    checkpoint = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    steps = {(tmp_path / f"steps_{rank}").read_text() for rank in range(3)}
    assert steps == {str(checkpoint["global_step"])}
    BoringModel().load_state_dict(checkpoint["state_dict"])


@pytest.mark.slow
def test_sigterm_to_everybody(tmp_path: Path) -> None:
    all_ends = ends(Training(victim=EVERYBODY, saves=True), signal.SIGTERM, tmp_path)
    assert {end.error for end in all_ends} <= {"SIGTERMException", "RankFailedError"}
    assert "SIGTERMException" in {end.error for end in all_ends}
    assert (tmp_path / "stopped.ckpt").exists()


@pytest.mark.slow
def test_sigterm_ends_a_job_whose_next_step_does_not_come() -> None:
    """All were to stop at a next step that never came: nothing but SIGKILL ended the job."""
    training = Training(event="hang", victim=0, timeout=600, grace=8)
    all_ends = ends(training, signal.SIGTERM)
    for end in all_ends[:2]:
        assert end.error == "RankFailedError"
        assert "rank 2 came to no next step within 8 s after rank 0 received SIGTERM" in end.message
        assert f"{Path('tests', 'strategies', 'rank_failures.py')}:" in end.message


@pytest.mark.slow
def test_a_rank_in_its_own_code_does_not_outlive_the_job() -> None:
    """It slept on when rank 0 had died and its launcher with it."""
    all_ends = ends(Training(event="hang", victim=0, timeout=600, grace=3), signal.SIGKILL)
    assert "rank 0 died" in all_ends[1].message
    assert "[rank 2] has not heard of it, and is ended" in all_ends[2].output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_raises_is_quoted(victim: int) -> None:
    training = Training(event="raise", victim=victim)
    all_ends = ends(training)
    assert all_ends[victim].error == "ValueError"
    for end in survivors(training, all_ends):
        assert end.error == "RankFailedError"
        assert f"rank {victim} raised ValueError: on purpose" in end.message


@pytest.mark.slow
def test_a_failing_rank_that_saves_on_exceptions_does_not_wait_for_the_others(
    tmp_path: Path,
) -> None:
    """The callback hears of it before the strategy, and saving is collective."""
    training = Training(event="raise", saves=True, timeout=60)
    all_ends = ends(training, folder=tmp_path)
    for end in survivors(training, all_ends):
        assert "rank 1 raised ValueError: on purpose" in end.message
    assert (all_ends[1].error, all_ends[1].message) == ("ValueError", "on purpose")
    assert all(end.seconds < patient(training.timeout / 2) for end in all_ends)
    assert "nothing is saved on this exception" in all_ends[1].output


@pytest.mark.slow
def test_a_rank_that_exits_is_named() -> None:
    training = Training(event="exit")
    for end in survivors(training, ends(training)):
        assert "rank 1 raised SystemExit: 0" in end.message


@pytest.mark.slow
def test_a_rank_that_does_something_else_is_told_of_with_what_it_does() -> None:
    for end in ends(Training(event="end early", max_steps=6, timeout=4)):
        assert end.error == "RankFailedError"
        assert "rank 1 was in " in end.message or "rank 2 was in " in end.message


@pytest.mark.slow
def test_a_run_that_ends_well_says_nothing() -> None:
    for end in ends(Training(max_steps=3)):
        assert end.error == ""
        assert "[rank" not in end.output
