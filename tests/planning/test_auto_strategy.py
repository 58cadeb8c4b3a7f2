"""`strategy="shard_auto"`: what it chooses trains as if it had been given by its name."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import AutoStrategy, ConfigError, ZeRO2Strategy
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimate
from lightning_shard.planning.machine import machine_profile
from lightning_shard.planning.plan import Plan
from lightning_shard.planning.report import RankMemory
from lightning_shard.strategies import auto_strategy
from lightning_shard.strategies.auto_strategy import DECIDED
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import ignoring
from tests.trainers import SILENT

pytestmark = ignoring(".*microbatches are fewer than the .* stages")
BATCH = 4
CHOICES = {
    "shard_ddp": {"dp": 4},
    "zero1": {"dp": 4, "zero_stage": 1, "num_microbatches": 2},
    "zero2": {"dp": 4, "zero_stage": 2, "checkpointing": "full"},
    "zero3": {"dp": 4, "zero_stage": 3},
    "tensor_parallel": {"dp": 2, "tp": 2, "zero_stage": 2, "num_microbatches": 2},
    "pipeline_parallel": {"pp": 4, "schedule": "1f1b", "num_microbatches": 4, "microbatch": 1}
    | {"rounds": 4},
    "hybrid_parallel": {"pp": 2, "dp": 2, "zero_stage": 3, "schedule": "1f1b", "rounds": 2}
    | {"num_microbatches": 2, "microbatch": 2},
}
"""Of each kind a choice, on four ranks."""


def as_planned(**values: Any) -> Any:
    """Return a function in the place of `plan`, which recommends the same always."""
    sizes = {"pp": 1, "dp": 1, "tp": 1, "zero_stage": 0, "schedule": ""}
    made = PlanCandidate(**{**sizes, "microbatch": BATCH, "num_microbatches": 1, **values})
    memory = RankMemory(**dict.fromkeys(RankMemory.__dataclass_fields__, 100))
    estimate = Estimate(
        candidate=made,
        rank=0,
        memory=memory,
        passing=0,
        sent={"pp": 0, "dp": 0, "tp": 0},
        idle_share=0.0,
        seconds=1.0,
        hidden_share=1.0,
    )

    def plan(module: Any, batch: Any, **options: Any) -> Plan:
        return Plan(
            machine=machine_profile("cpu"),
            num_devices=options["devices"],
            ranks_per_node=options["devices"] // options["nodes"],
            device_memory=2**30,
            global_batch=options["global_batch"],
            precision=options["precision"],
            num_parameters=1,
            tensor_plan=None,
            estimates=(estimate,),
            recommendation=estimate,
        )

    return plan


def loader(model: ExampleGPT) -> DataLoader:
    return DataLoader(model.data(96), batch_size=BATCH, shuffle=True)


def trainer(strategy: Any, folder: Path, devices: int = 4, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": devices,
            "max_steps": 3,
            **SILENT,
            "default_root_dir": folder,
            **options,
        }
    )


def fitted(strategy: Any, folder: Path, **options: Any) -> tuple[L.Trainer, dict[str, Tensor]]:
    L.seed_everything(0, verbose=False)
    model = ExampleGPT(num_layers=4)
    found = trainer(strategy, folder, **options)
    found.fit(model, loader(model))
    return found, model.state_dict()


def written(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((folder / "shard_auto.yaml").read_text())["trainer"]
    return config


def made_from(config: dict[str, Any]) -> Any:
    kind = getattr(lightning_shard, config["strategy"]["class_path"].rpartition(".")[2])
    return kind(**config["strategy"]["init_args"])


def assert_same_as_given_directly(folder: Path, weights: dict[str, Tensor], **options: Any) -> None:
    config = written(folder)
    accumulated = config.get("accumulate_grad_batches", 1)
    _, expected = fitted(made_from(config), folder, **options, accumulate_grad_batches=accumulated)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("zero3", "hybrid_parallel") else pytest.mark.slow)
        for name in CHOICES
    ],
)
def test_what_is_chosen_trains_to_the_same_bits_as_given_directly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_strategy, "plan", as_planned(**CHOICES[name]))
    found, weights = fitted("shard_auto_in_process", tmp_path)
    assert type(found.strategy) is getattr(lightning_shard, as_candidate(name).class_name)
    assert found.strategy.prediction["recommendation"]["strategy"] == name
    assert_same_as_given_directly(tmp_path, weights)


def as_candidate(name: str) -> PlanCandidate:
    planned = as_planned(**CHOICES[name])(
        None, None, devices=4, nodes=1, global_batch=1, precision=""
    )
    made: PlanCandidate = planned.recommendation.candidate
    assert made.strategy == name
    return made


@pytest.mark.slow
def test_it_plans_for_the_memory_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    strategy = AutoStrategy(backend="in_process", device_memory=2**20)
    found, weights = fitted(strategy, tmp_path, devices=2)
    assert type(found.strategy) is not AutoStrategy
    told = caplog.text + capsys.readouterr().err
    assert "shard_auto chooses:" in told
    assert "the fastest of" in told
    assert "shard_auto.yaml fixes this choice" in told
    prediction: Any = found.strategy.prediction  # type: ignore[attr-defined]
    assert prediction["recommendation"]["memory"]["peak"] <= prediction["device_memory"] == 2**20
    rows = prediction["candidates"]
    assert any(not one["fits"] for one in rows)
    assert json.loads((tmp_path / "plan.json").read_text()) == prediction
    assert_same_as_given_directly(tmp_path, weights, devices=2)


@pytest.mark.slow
def test_the_free_memory_is_taken_by_default(tmp_path: Path) -> None:
    found, _ = fitted("shard_auto_in_process", tmp_path, devices=2)
    prediction: Any = found.strategy.prediction  # type: ignore[attr-defined]
    assert 2**28 < prediction["device_memory"] < 2**50


def test_the_samples_of_a_step_stay_those_of_as_many_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    planned = as_planned(dp=2, zero_stage=1, num_microbatches=3)

    def plan(*args: Any, **options: Any) -> Plan:
        asked.update(options)
        found: Plan = planned(*args, **options)
        return found

    monkeypatch.setattr(auto_strategy, "plan", plan)
    found, _ = fitted(
        "shard_auto_in_process", tmp_path, devices=2, accumulate_grad_batches=3, max_steps=2
    )
    assert (asked["global_batch"], asked["batch_size"]) == (BATCH * 2 * 3, BATCH)
    assert found.accumulate_grad_batches == 3
    assert found.global_step == 2


@pytest.mark.slow
def test_nothing_that_fits_is_an_error_that_says_the_least(tmp_path: Path) -> None:
    strategy = AutoStrategy(backend="in_process", device_memory=1000, announce=False)
    with pytest.raises(ConfigError, match=r"nothing that fits\. Nothing fits 1000 B a device"):
        fitted(strategy, tmp_path, devices=1)


class AsksForElements(ExampleGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


def test_a_step_that_asks_for_elements_is_refused_with_advice(tmp_path: Path) -> None:
    model = AsksForElements(num_layers=2)
    with pytest.raises(ConfigError, match=r"shard_auto' could not plan for .* Name a strategy"):
        trainer("shard_auto_in_process", tmp_path, devices=2).fit(model, loader(model))


def test_a_schedule_of_accumulation_is_refused(tmp_path: Path) -> None:
    callbacks = [GradientAccumulationScheduler({0: 2})]
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler changes how many"):
        fitted("shard_auto_in_process", tmp_path, devices=2, callbacks=callbacks)


def test_data_that_give_each_batch_once_are_refused(tmp_path: Path) -> None:
    model = ExampleGPT(num_layers=2)
    batches = iter(list(loader(model)))
    with pytest.raises(ConfigError, match="which gives each batch once"):
        trainer("shard_auto_in_process", tmp_path, devices=1).fit(model, batches)


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_memory must be a whole number of at least 1"):
        AutoStrategy(device_memory=0)


@pytest.mark.filterwarnings("ignore:.*DistributedSampler")
def test_a_validation_before_the_fit_runs_and_the_fit_still_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Validated(ExampleGPT):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

    monkeypatch.setattr(auto_strategy, "plan", as_planned(dp=2, zero_stage=2))
    model = Validated(num_layers=2)
    found = trainer("shard_auto_in_process", tmp_path, devices=2)
    data = DataLoader(model.data(32), batch_size=BATCH)
    (before,) = found.validate(model, data, verbose=False)
    assert type(found.strategy) is AutoStrategy
    found.fit(model, loader(model))
    assert type(found.strategy) is ZeRO2Strategy
    (after,) = found.validate(model, data, verbose=False)
    assert after["loss"] < before["loss"]
    found.fit_loop.max_epochs = 2
    found.fit(model, loader(model))  # goes on with the choice
    assert type(found.strategy) is ZeRO2Strategy


def test_lightning_cli_takes_the_name_and_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["program", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    base.append("--seed_everything=0")
    for strategy in (
        ["--trainer.strategy=shard_auto_in_process"],
        [
            "--trainer.strategy=lightning_shard.AutoStrategy",
            "--trainer.strategy.init_args.backend=in_process",
            "--trainer.strategy.init_args.device_memory=1000000",
        ],
    ):
        monkeypatch.setattr(sys, "argv", [*base, *strategy])
        monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 causes them
        cli = LightningCLI(ExampleGPT, run=False, save_config_callback=None)
        assert type(cli.trainer.strategy) is AutoStrategy
    assert cli.trainer.strategy._auto.device_memory == 1000000


def test_what_a_choice_decides_is_all_in_which_strategies_differ() -> None:
    auto = vars(AutoStrategy(backend="in_process"))
    for name in CHOICES:
        made = as_candidate(name)
        chosen = getattr(lightning_shard, made.class_name)(backend="in_process", **made.options())
        plain = (str, int, float, bool, type(None), tuple)
        differing = {
            key
            for key, value in vars(chosen).items()
            if key in auto and isinstance(value, plain) and value != auto[key]
        }
        assert differing <= set(DECIDED)
        assert {key for key in vars(chosen) if key not in auto} <= {
            *DECIDED,
            "_stages",
            "_experts",
        }
