"""Fabric over Gloo processes, by `fabric.launch()`, and on ranks that are threads."""

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.errors import ConfigError, ShardError
from tests.fabric.loops import NUM_STEPS, Run, assert_same, fabric_of, run_of, strategy_of
from tests.fabric.nets import Net, adam, assert_close, batch_of, on_one, on_ranks, weights_of
from tests.processes import check, run_alone, run_processes
from tests.strategies.parity import (
    STRATEGIES,
    Case,
    ignore_upstream_warnings,
    ignoring,
    train_ranks,
)

SHARED = Net()  # among a module's globals, so every rank's


def fitted(fabric: Fabric, module: nn.Module, optimizer: Any, num_steps: int = 2) -> Any:
    model, wrapped = fabric.setup(module, optimizer)
    for number in range(num_steps):
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        wrapped.step()
        wrapped.zero_grad()
    return model


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_the_callers_objects_are_trained_and_full_afterwards(stage: str) -> None:
    """Passed, or in the function's closure; optimizers have full states, and go on from there."""
    passed, enclosed = Net(), Net()
    optimizers = [adam(passed), adam(enclosed)]

    def loop(fabric: Fabric, module: nn.Module, optimizer: Any) -> Any:
        fitted(fabric, enclosed, optimizers[1])
        return fitted(fabric, module, optimizer)

    model = on_ranks(stage, loop, passed, optimizers[0])
    expected = Net()
    on_one(fitted, expected, adam(expected))
    for module in (passed, enclosed, model):
        assert_close(weights_of(module), weights_of(expected))
    assert optimizers[0].state[passed.head.weight]["exp_avg"].shape == (2, 6)
    batch = torch.ones(1, 4)
    assert_close(model(batch), expected(batch))
    on_ranks(stage, loop, passed, optimizers[0])  # and once more


def test_each_rank_has_what_it_needs() -> None:
    def loop(fabric: Fabric, word: str) -> Any:
        rank = fabric.global_rank
        value = torch.tensor([float(rank)])
        total = fabric.all_reduce(value, reduce_op="sum")
        assert total is value
        assert fabric.all_gather({"a": torch.tensor(rank)})["a"].tolist() == [0, 1, 2]
        assert fabric.broadcast([rank, word], src=1) == [1, "x"]
        assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not fabric.strategy.reduce_boolean_decision(rank == 0)
        assert fabric.is_global_zero == (rank == 0)
        assert fabric.world_size == 3
        fabric.seed_everything(3 + rank, verbose=False)
        own = torch.Generator().manual_seed(3 + rank)
        assert torch.rand(1).item() == torch.rand(1, generator=own).item()
        with fabric.rank_zero_first():
            fabric.print(f"rank {rank}")
        fabric.barrier()
        return total.item(), fabric.device.type

    assert on_ranks("zero1", loop, "x", devices=3) == (3.0, "cpu")


def test_loaders_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    def loop(fabric: Fabric) -> Any:
        loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True)
        loader = fabric.setup_dataloaders(loader)
        epochs = [torch.cat([batch[0] for batch in loader]) for _ in range(2)]
        assert len(loader) == 3
        return [fabric.all_gather(epoch).flatten().tolist() for epoch in epochs]

    first, second = on_ranks("zero2", loop)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


class Told:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def on_step(self, number: int) -> None:
        self.said.append(number)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.said.append(type(optimizer).__name__)


def test_callbacks_are_called_and_loggers_log_once(tmp_path: Any) -> None:
    told = Told()

    class Noting(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            noted.append((dict(metrics), step))

    noted: list[Any] = []
    logger = Noting(tmp_path)

    def loop(fabric: Fabric) -> None:
        module = Net()
        fitted(fabric, module, adam(module), num_steps=1)
        fabric.call("on_step", number=fabric.global_rank)
        fabric.log("loss", torch.tensor(2.0), step=1)
        fabric.log_dict({"a": 1})

    on_ranks("zero2", loop, callbacks=told, loggers=logger)
    assert told.said == ["AdamW", 0]
    assert noted == [({"loss": 2.0}, 1), ({"a": 1}, None)]


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_loggers_are_given_full_weights_and_gradients(name: str, tmp_path: Any) -> None:
    """Rank 0 alone read what every rank gave: a mismatch, and on Gloo a job that waits."""
    seen: dict[str, Tensor] = {}

    class Histograms(CSVLogger):
        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            return self

        def add_histogram(self, name: str, values: Tensor) -> None:
            seen[name] = torch.tensor(values.flatten().tolist())

        @rank_zero_only
        def log_histogram(self, name: str, values: Tensor) -> None:
            self.add_histogram(f"own {name}", values)

    def loop(fabric: Fabric) -> dict[str, Tensor]:
        module = Net()
        optimizer = adam(module)
        model, _ = fabric.setup(module, optimizer)
        fabric.backward(model(batch_of(fabric)).square().mean())
        for number, param in enumerate(module.parameters()):
            fabric.logger.experiment.add_histogram(f"weight {number}", param)
            fabric.logger.log_histogram(f"grad {number}", param.grad)
        return dict(seen)

    logger = Histograms(tmp_path)
    assert_close(on_ranks(name, loop, loggers=logger), on_one(loop, loggers=logger))


def test_what_rank_0_alone_gives_a_logger_is_named(tmp_path: Any) -> None:
    def loop(fabric: Fabric) -> None:
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        fabric.backward(model(batch_of(fabric)).square().mean())
        optimizer.step()
        if fabric.is_global_zero:
            fabric.logger.log_metrics({"first": next(module.parameters())})
        fabric.barrier()

    with pytest.raises(ShardError, match="every rank must read it, or none"):
        on_ranks("zero3", loop, loggers=CSVLogger(tmp_path))


def test_a_lightning_module_logs_and_steps_through_its_fabric() -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adam(self)

    def loop(fabric: Fabric) -> Any:
        module = Module()
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        for number in range(2):
            fabric.backward(model.training_step(batch_of(fabric, number), number))
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    assert_close(on_ranks("zero3", loop), on_one(loop))


def test_a_subclass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Fabric):
        def run(self, module: nn.Module) -> Any:
            fitted(self, module, adam(module))
            return self.world_size

    module, expected = Net(), Net()
    own = Own(strategy=strategy_of("zero3"), accelerator="cpu", devices=2)
    assert own.run(module) == 2
    on_one(fitted, expected, adam(expected))
    assert_close(weights_of(module), weights_of(expected))


def test_modules_are_made_in_place_and_empty() -> None:
    def loop(fabric: Fabric) -> Any:
        with fabric.init_module(empty_init=True):
            empty = nn.Linear(3, 3)
        with fabric.init_module():
            full = nn.Linear(3, 3)
        assert full.weight.dtype == torch.bfloat16
        assert full.weight.abs().sum() > 0
        with fabric.autocast():
            model = fabric.setup_module(empty)
        return model(torch.ones(1, 3)).dtype

    assert on_ranks("zero3", loop, precision="bf16-true") == torch.float32


def test_copies_of_a_module_are_modules_of_their_own() -> None:
    """As an average of weights is made; a copy's states and forwards are its own."""

    def loop(fabric: Fabric) -> Any:
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        average = copy.deepcopy(model.module)
        for number in range(3):
            fabric.backward(model(batch_of(fabric, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for own, new in zip(average.parameters(), module.parameters(), strict=True):
                    own.lerp_(new, 0.5)
        with pytest.raises(ConfigError, match=r"Copy model\.module"):
            copy.deepcopy(model)
        return weights_of(model)

    expected = on_one(lambda fabric: weights_of(fitted(fabric, *pair(Net()), num_steps=3)))
    for stage in ("shard_ddp", "zero3"):
        assert_close(on_ranks(stage, loop), expected)


def pair(module: nn.Module) -> Any:
    return module, adam(module)


def test_a_launch_without_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the function that each runs"):
        fabric_of("zero3_in_process").launch()


def test_a_module_of_all_ranks_is_refused() -> None:
    def loop(fabric: Fabric) -> None:
        fabric.setup_module(SHARED)

    with pytest.raises(ConfigError, match="was set up by rank 0, which is a thread"):
        on_ranks("zero2", loop)


def test_the_fabric_of_another_rank_is_refused() -> None:
    fabric = fabric_of("zero2_in_process")
    globals()["FABRIC"] = fabric

    def loop(own: Fabric) -> None:
        FABRIC.barrier()  # noqa: F821

    with pytest.raises(ConfigError, match="Rank 1 uses the Fabric of rank 0"):
        fabric.launch(loop)


def test_a_failed_rank_is_named_and_shards_are_not_taken_for_a_model() -> None:
    module = Net()

    def loop(fabric: Fabric, module: nn.Module) -> None:
        fitted(fabric, module, adam(module))
        if fabric.global_rank == 1:
            raise ValueError("of rank 1")
        fabric.barrier()

    with pytest.raises(ValueError, match="of rank 1"):
        on_ranks("zero3", loop, module)
    with pytest.raises(ConfigError, match="only one rank's shard"):
        on_ranks("zero3", lambda fabric, module: fabric.setup_module(module), module)


def test_a_module_without_values_is_refused() -> None:
    def loop(fabric: Fabric) -> None:
        with torch.device("meta"):
            module = nn.Linear(2, 2)
        fabric.setup_module(module)

    with pytest.raises(ConfigError, match="on the device 'meta'"):
        on_ranks("zero3", loop)


def test_ranks_that_set_up_other_models_are_refused() -> None:
    def loop(fabric: Fabric) -> None:
        fabric.setup_module(nn.Linear(2, 2 + fabric.global_rank))

    with pytest.raises(ConfigError, match="the ranks have different models"):
        on_ranks("zero2", loop)


def test_loaders_are_made_as_before_after_a_launch() -> None:
    """Ranks took each other's wrappers of constructors for the originals, which stayed wrapped."""

    class Own(DataLoader[Any]):
        def __init__(self, **settings: Any) -> None:
            super().__init__(range(8), **settings)

    before = DataLoader.__init__, Own.__init__
    strategy = strategy_of("zero1")
    fabric = fabric_of(strategy)
    fabric.launch(lambda fabric: fabric.barrier())
    assert (DataLoader.__init__, Own.__init__) == before


pytestmark = ignoring()


def both(strategies: list[str], num_steps: int = NUM_STEPS) -> list[tuple[Run, Run]]:
    """Train by hand and under a Trainer, one stage after the other; for `run_processes`."""
    ignore_upstream_warnings()
    return [
        (run_of(strategy_of(one, "gloo"), "gpt", num_steps), under_trainer(one, num_steps))
        for one in strategies
    ]


def under_trainer(strategy: str, num_steps: int) -> Run:
    case = Case(model="gpt", strategy=strategy, num_ranks=2, num_steps=num_steps)
    return train_ranks(case, "gloo")


@pytest.mark.slow
def test_a_few_steps_equal_the_trainers() -> None:
    for [(run, expected)] in run_processes(both, 2, strategies=["zero3"], num_steps=3):
        assert_same(run, expected)


@pytest.mark.slow
def test_20_steps_equal_the_trainers_under_every_stage() -> None:
    for runs in run_processes(both, 2, strategies=list(STRATEGIES)):
        for run, expected in runs:
            assert_same(run, expected)


SCRIPT = """
import sys

import torch
from lightning.fabric import Fabric

import lightning_shard

fabric = Fabric(strategy="zero3", accelerator="cpu", devices=2)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
for step in range(3):
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1:] == ["fail"] and fabric.global_rank == 1:
    raise ValueError("of rank 1")
fabric.barrier()
fabric.save("saved", {"model": model, "optimizer": optimizer})
fabric.print(f"done on {fabric.world_size} ranks")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        monkeypatch.delenv(name)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace('"saved"', repr(str(tmp_path / "saved"))))
    return path


@pytest.mark.slow
def test_a_script_launches_its_ranks(script: Path) -> None:
    finished = run_alone(str(script))
    check([finished])
    assert finished.output.count("done on 2 ranks") == 1
    assert (script.parent / "saved").is_file()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_script(script: Path) -> None:
    finished = run_alone(str(script), "fail")
    assert finished.returncode != 0
    assert "of rank 1" in finished.output
