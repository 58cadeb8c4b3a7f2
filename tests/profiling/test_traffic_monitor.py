"""Counters by axis: what a group's axis is, and what counts since when."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import TensorParallelStrategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.backends.traffic import OperationTraffic
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.profiling.step_monitor import (
    AxisCounters,
    Expectations,
    axis_of,
    seconds_in,
    waited,
)
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.profiling.monitored import fit, monitors, written
from tests.strategies.parity import build, ignoring, quiet_trainer


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        ((0, 1), "tp"),
        ((0, 2), "dp"),
        ((0, 4), "pp"),
        ((0, 1, 4, 5), "pp+tp"),
        (tuple(range(8)), "pp+dp+tp"),
        ((3,), ""),
        ((0, 8), "other"),
    ],
)
def test_a_groups_axis_is_where_its_ranks_differ(ranks: tuple[int, ...], axis: str) -> None:
    assert axis_of(ParallelMesh(pp=2, dp=2, tp=2), ranks) == axis


class _TwoRanks(ZeRO2Strategy):
    """Knows its mesh without a Trainer."""

    mesh = ParallelMesh(dp=2)  # type: ignore[assignment]


def _counted_twice(rank: int) -> list[tuple[int, int]]:
    group = all_ranks()
    group.all_reduce(torch.ones(4)).wait()
    counters = AxisCounters(_TwoRanks(backend="in_process"))
    found = []
    for numel in (6, 10):
        group.all_reduce(torch.ones(numel)).wait()
        one = counters.since()["dp"]["all_reduce"]
        found.append((one.calls, one.bytes))
    assert counters.since() == {}
    return found


def test_what_was_sent_before_does_not_count_again() -> None:
    assert run_ranks(_counted_twice, 2) == [[(1, 24), (1, 40)]] * 2  # 2n(N-1)/N elements of 4


def test_sums_of_seconds() -> None:
    traffic = {
        "dp": {
            "all_gather": OperationTraffic(seconds=3.0, seconds_waited=2.0),
            "all_reduce": OperationTraffic(seconds=1.0, seconds_waited=0.5),
        },
        "tp": {"all_reduce": OperationTraffic(seconds=0.25, seconds_waited=0.25)},
    }
    assert waited(traffic) == {"dp": 2.5, "tp": 0.25}
    assert seconds_in(traffic) == 4.25


pytestmark = ignoring()


class Drawing(BoringModel):
    """Draws from every stream, counts its steps, and has a layer that draws."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        scale = random.random() + np.random.rand() + torch.rand(()).item()
        return self.dropout(self.layer(batch)).mean() * scale


class Looking(pl.Callback):
    """Compares the streams and the module before and after."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Drawing, batch: Any, _: int
    ) -> None:
        expectations: Expectations = self.expectations  # of rank 0, or of each
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        self.flops, self.dry_run = expectations.flops(batch), expectations.dry_run(batch)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        assert module.num_steps == 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.expectations = Expectations(pl_module, trainer.strategy, "32-true")


def test_streams_and_module_stay_as_they_are() -> None:
    looking = Looking()
    trainer = quiet_trainer(
        strategy=ZeRO2Strategy(backend="in_process"),
        devices=2,
        callbacks=[looking],
        max_steps=1,
        limit_val_batches=0,
        accumulate_grad_batches=1,
    )
    trainer.fit(Drawing())
    assert looking.expectations.obstacles == {}
    assert looking.flops == 3 * 2 * 32 * 2 - 2 * 32 * 2  # no gradient of the input
    assert looking.dry_run.ranks[0].num_parameters == 66


class Reading(BoringModel):
    """Asks for the elements of its batch, and for its trainer's data."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.trainer.num_training_batches < float("inf")
        return super().training_step(batch, batch_idx)["loss"]


def test_a_step_that_needs_its_trainer_is_trained_and_the_reason_written(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        strategy=ZeRO2Strategy(backend="in_process"),
        devices=2,
        callbacks=monitors(tmp_path),
        max_steps=2,
        limit_val_batches=0,
        accumulate_grad_batches=1,
    )
    trainer.fit(Reading())
    (flops,), (dry_run,) = (written(tmp_path, 0, kind) for kind in ("flops", "dry_run"))
    assert flops["per"] == {}
    assert "AssertionError" in flops["obstacle"]
    assert dry_run["ranks"] == []
    assert "needs no trainer" in dry_run["obstacle"]
    assert len(written(tmp_path, 0, "step")) == 2


@pytest.mark.slow
def test_persistent_bytes_and_traffic_are_those_of_the_dry_run(tmp_path: Path) -> None:
    fit("gpt", monitors(tmp_path), strategy=ZeRO3Strategy(backend="in_process"), devices=2)
    (expected,) = written(tmp_path, 0, "dry_run")[0]["ranks"]
    held = written(tmp_path, 0, "memory")[-1]["held"]
    assert held["parameters"] == expected["memory"]["parameters"]
    assert held["gradients"] == expected["memory"]["gradients"]
    assert held["optimizer_state"] == pytest.approx(expected["memory"]["optimizer_state"], rel=0.01)
    traffic = written(tmp_path, 0, "traffic")[-1]
    sent = sum(one["bytes"] for one in traffic["axes"]["dp"].values()) / traffic["steps"]
    assert sent == pytest.approx(expected["sent"]["dp"], rel=0.01)


@pytest.mark.slow
def test_a_tensor_parallel_plan_that_was_found_is_that_of_the_dry_run(tmp_path: Path) -> None:
    strategy = TensorParallelStrategy(backend="in_process")
    fit("gpt", monitors(tmp_path), strategy=strategy, devices=2)
    (expected,) = written(tmp_path, 0, "dry_run")[0]["ranks"]
    held = written(tmp_path, 0, "memory")[-1]["held"]
    assert held["parameters"] == expected["memory"]["parameters"]
    assert expected["memory"]["parameters"] < 0.6 * sum(
        param.nbytes for param in build("gpt").parameters()
    )
    assert expected["sent"]["tp"] > 0
