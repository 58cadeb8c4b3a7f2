"""Monitored fits: the same bits as others, a file of each rank, and what is refused."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_shard
from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.reporting.records import path_of, read_run
from lightning_shard.errors import ConfigError
from lightning_shard.profiling import MemoryMonitor, StepMonitor, TrafficMonitor
from lightning_shard.testing import Fault
from tests.elastic.runs import Classifier, Journal
from tests.elastic.runs import fit as fit_elastic
from tests.processes import run_alone, run_processes
from tests.profiling.monitored import fit, monitors, written
from tests.strategies.parity import (
    GlobalBatches,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
)

pytestmark = ignoring()

SPLIT = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}


def run(name: str, ranks: int, model: str, callbacks: list[Any], **options: Any) -> Any:
    strategy = getattr(lightning_shard, name)(backend="in_process", **options)
    return fit(model, callbacks, strategy=strategy, devices=ranks)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "ranks", "model"),
    [
        ("DDPStrategy", 2, "lstm"),
        ("ZeRO1Strategy", 2, "lstm"),
        ("ZeRO2Strategy", 2, "lstm"),
        ("ZeRO3Strategy", 3, "lstm"),
        ("TensorParallelStrategy", 2, "gpt"),
        ("PipelineParallelStrategy", 2, "layers"),
        ("ContextParallelStrategy", 2, "gpt"),
        ("LocalSGDStrategy", 2, "lstm"),
        ("AsyncSGDStrategy", 2, "lstm"),
        ("ElasticStrategy", 2, "lstm"),
    ],
)
def test_a_monitored_fit_has_the_same_losses_and_weights_to_the_bit(
    name: str, ranks: int, model: str, tmp_path: Path
) -> None:
    plain = run(name, ranks, model, [])
    watched = run(name, ranks, model, monitors(tmp_path, "h100"))
    assert watched.losses == plain.losses
    for key, weight in plain.weights.items():
        assert torch.equal(watched.weights[key], weight), key
    for rank in range(ranks):
        steps = written(tmp_path, rank, "step")
        assert [one["step"] for one in steps] == [1, 2, 3, 4]
        assert len(written(tmp_path, rank, "memory")) == 2
    assert all(told["obstacle"] is None for told in written(tmp_path, 0, "dry_run"))


class Counting(pl.Callback):
    """Takes down what this rank has called and sent in a fit; meets no gradient."""

    def on_train_end(self, *_: Any) -> None:
        self.counted = [
            (group.ranks, {name: (one.calls, one.bytes) for name, one in group.traffic.items()})
            for group in Collectives.traffic_by_group()
        ]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["ZeRO1Strategy", "ZeRO3Strategy", "TensorParallelStrategy"])
def test_a_monitored_fit_sends_nothing_more(name: str, tmp_path: Path) -> None:
    counted = []
    for watched in ([], monitors(tmp_path)):
        counting = Counting()
        model = build("gpt")
        trainer = quiet_trainer(
            strategy=getattr(lightning_shard, name)(backend="in_process"),
            devices=2,
            callbacks=[counting, *watched],
            max_steps=3,
        )
        trainer.fit(model, datamodule=GlobalBatches(model, 3))
        counted.append(counting.counted)
    assert counted[0] == counted[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_monitored_hybrid_fit_has_the_same_bits_and_all_axes(tmp_path: Path) -> None:
    plain = run("HybridParallelStrategy", 8, "gpt_8", [], **SPLIT, zero_stage=1)
    watched = run("HybridParallelStrategy", 8, "gpt_8", monitors(tmp_path), **SPLIT, zero_stage=1)
    assert watched.losses == plain.losses
    assert all(torch.equal(watched.weights[key], one) for key, one in plain.weights.items())
    for rank in range(8):
        assert {"pp", "dp", "tp"} <= written(tmp_path, rank, "step")[-1]["waiting"].keys()


def _fit_over_gloo(folder: str) -> list[float]:
    ignore_upstream_warnings()
    strategy = lightning_shard.ZeRO2Strategy(backend="gloo")
    watched = monitors(Path(folder)) if folder else []
    return fit("lstm", watched, strategy=strategy, devices=2).losses


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_over_gloo_write_a_file_each_and_have_the_same_losses(tmp_path: Path) -> None:
    plain = run_processes(_fit_over_gloo, 2, folder="")
    assert run_processes(_fit_over_gloo, 2, folder=str(tmp_path)) == plain
    processes = {written(tmp_path, rank, "fit")[0]["process"] for rank in range(2)}
    assert len(processes) == 2
    for rank in range(2):
        assert [one["step"] for one in written(tmp_path, rank, "step")] == [1, 2, 3, 4]
        assert written(tmp_path, rank, "fit")[0]["backend"] == "gloo"


def test_gradients_of_two_batches_are_one_step(tmp_path: Path) -> None:
    strategy = lightning_shard.ZeRO1Strategy(backend="in_process")
    fit("lstm", monitors(tmp_path), strategy=strategy, devices=2, accumulate_grad_batches=2)
    steps = written(tmp_path, 1, "step")
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    assert {one["num_batches"] for one in steps} == {2}
    assert {one["samples"] for one in steps} == {12}  # 2 batches of 12, over 2 ranks
    assert sum(one["batches"] for one in written(tmp_path, 1, "traffic")) == 8


class Failing(pl.Callback):
    """Raises on every rank before the third batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError("the disk is full")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_have_their_learning_rate_and_the_norm_that_was_clipped(
    clip: float | None, tmp_path: Path
) -> None:
    """A page had neither; a norm that nobody asks for would have to be summed over the ranks."""
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process")
    fit("lstm", [StepMonitor(tmp_path)], strategy=strategy, devices=2, gradient_clip_val=clip)
    steps = [written(tmp_path, rank, "step") for rank in range(2)]
    assert all(one["learning_rate"] > 0 for one in steps[0] + steps[1])
    norms, others = ([one["grad_norm"] for one in each] for each in steps)
    assert norms == others
    assert norms == [None] * 4 if clip is None else all(norm > 0 for norm in norms)


def test_what_was_written_before_a_failure_stays_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk is full"):
        run("ZeRO2Strategy", 2, "lstm", [*monitors(tmp_path), Failing()])
    for rank in range(2):
        assert [one["step"] for one in written(tmp_path, rank, "step")] == [1, 2]
        assert "disk is full" in written(tmp_path, rank, "failure")[0]["error"]


_KILLED = """
import os, signal, sys, warnings
import lightning.pytorch as pl
from pathlib import Path
import lightning_shard
from tests.profiling.monitored import fit, monitors

class Kill(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

strategy = lightning_shard.ZeRO2Strategy(backend="in_process")
fit("lstm", [*monitors(Path(sys.argv[1])), Kill()], strategy=strategy, devices=2, num_steps=9)
"""


@pytest.mark.slow
def test_a_killed_run_can_be_reported_but_for_its_last_step(tmp_path: Path) -> None:
    assert run_alone("-c", _KILLED, str(tmp_path)).returncode == -9
    found = read_run(tmp_path)
    assert sorted({one["step"] for one in found.of("step")}) == [1, 2, 3, 4, 5]
    assert found.num_unreadable == 0
    assert not found.of("end")


@pytest.mark.slow
def test_a_lost_rank_makes_a_generation_and_its_later_steps_do_not_count(tmp_path: Path) -> None:
    fit_elastic([Fault(3, 2, "drop", at_step=5)], trainer_options={"callbacks": monitors(tmp_path)})
    found = read_run(tmp_path)
    generations = {one["number"]: one for one in found.of("generation")}
    assert [len(one["members"]) for one in generations.values()] == [4, 3]
    assert "rank 3" in generations[2]["reason"]
    behind = generations[2]["step"]
    assert behind <= 5
    steps = {step: [] for step in range(1, 15)}
    for one in found.of("step"):
        steps[one["step"]].append(one["rank"])
    for step, ranks in steps.items():
        assert sorted(ranks) == list(range(4 if step <= behind else 3)), step


def test_an_elastic_fit_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="StepMonitor has no folder"):
        fit_elastic(trainer_options={"callbacks": [StepMonitor()]}, module=Classifier(Journal()))


def test_the_folder_is_the_loggers_where_none_is_given(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="logs", version=7)
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process")
    options = {"logger": logger, "log_every_n_steps": 1}
    fit("lstm", [StepMonitor()], strategy=strategy, devices=2, **options)
    assert path_of(tmp_path / "logs" / "version_7", 1).is_file()


def test_loggers_get_the_figures_of_rank_0(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process")
    options = {"logger": logger, "log_every_n_steps": 1}
    fit("gpt", monitors(tmp_path, "h100"), strategy=strategy, devices=2, **options)
    head = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0].split(",")
    names = {name.removeprefix("monitor/") for name in head if name.startswith("monitor/")}
    assert {
        "step_seconds",
        "compute_seconds",
        "optimizer_seconds",
        "waiting_seconds/dp",
        "tokens_per_second",
        "flops_per_second_and_rank",
        "mfu",
        "sent_bytes/dp",
        "memory/parameters",
        "memory/optimizer_state",
    } <= names


@pytest.mark.parametrize("monitor", [StepMonitor, TrafficMonitor, MemoryMonitor])
def test_another_packages_strategy_is_refused(monitor: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{monitor.__name__} shows .* SingleDeviceStrategy"):
        fit("lstm", [monitor(tmp_path)])


@pytest.mark.parametrize("monitor", [TrafficMonitor, MemoryMonitor])
def test_steps_between_records_are_at_least_one(monitor: Any) -> None:
    with pytest.raises(ConfigError, match="every_n_steps must be a whole number of at least 1"):
        monitor(every_n_steps=0)


def test_a_second_fit_of_the_same_trainer_begins_anew(tmp_path: Path) -> None:
    watched = monitors(tmp_path)
    for _ in range(2):
        run("ZeRO2Strategy", 2, "lstm", watched)
    assert len(written(tmp_path, 0, "fit")) == 6  # of three monitors
    found = read_run(tmp_path)
    assert [one["step"] for one in found.of("step") if one["rank"] == 0] == [1, 2, 3, 4]


def test_every_line_is_json_of_its_own(tmp_path: Path) -> None:
    run("ZeRO3Strategy", 2, "lstm", monitors(tmp_path))
    for line in path_of(tmp_path, 0).read_text().splitlines():
        assert json.loads(line)["rank"] == 0


class GapsInData(torch.utils.data.IterableDataset):
    """Gives None first, and between batches."""

    def __iter__(self) -> Any:
        return iter([None, torch.ones(4, 4), None, torch.ones(4, 4)])


class OfGaps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(GapsInData(), batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_of_none_is_left_out_of_what_is_monitored(tmp_path: Path) -> None:
    """The first of a fit ended it with a bare AssertionError; Lightning goes on without it."""
    strategy = lightning_shard.ZeRO3Strategy(backend="in_process")
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, callbacks=monitors(tmp_path, "h100")
    )
    trainer.fit(OfGaps())
    assert len(written(tmp_path, 0, "step")) == 2
