"""At a time-out each rank's last operations and stacks stand in a file that the error names."""

import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.backends import liveness
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.stacks import KEPT
from lightning_shard.errors import RankFailedError
from tests.processes import run_processes
from tests.strategies.models import TiedLSTM
from tests.strategies.parity import (
    STRATEGIES,
    GlobalBatches,
    ignore_upstream_warnings,
    quiet_trainer,
)


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


def test_the_rank_that_others_wait_for_writes_where_it_is(tmp_path: Path) -> None:
    waited, computed = run_processes(fit, 2, folder=tmp_path)
    assert "in compute_for_long" in written(computed, 1).read_text()
    assert "in compute_for_long" not in written(waited, 0).read_text()
    assert "began " in written(waited, 0).read_text()
