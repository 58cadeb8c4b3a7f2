"""The strategies under `pytorch_lightning`: the source of `lightning.pytorch` by another name."""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard import on_pytorch_lightning
from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning import mirror
from tests.examples.commands import ignoring_advice, set_arguments
from tests.processes import check, run_alone
from tests.trainers import SILENT

pytestmark = ignoring_advice(
    ".*microbatches are fewer", ".*callbacks used to create the checkpoint"
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "shard_ddp": {"strategy": "shard_ddp_in_process", "devices": 2},
    "zero2": {"strategy": "zero2_in_process", "devices": 2, "gradient_clip_val": 0.1},
    "zero3": {"strategy": "zero3_in_process", "devices": 2, "precision": "bf16-mixed"},
    "tensor_parallel": {"strategy": "tensor_parallel_in_process", "devices": 2},
    "pipeline_parallel": {"strategy": "pipeline_parallel_in_process", "devices": 2},
    "hybrid_parallel": {"strategy": "hybrid_parallel_in_process", "devices": 2},
    "local_sgd": {"strategy": "local_sgd_in_process", "devices": 2},
    "async_sgd": {"strategy": "async_sgd_in_process", "devices": 2},
    "elastic": {"strategy": "elastic_in_process", "devices": 2},
}


def model_of(package: Any) -> Any:
    """Return a model that is built on a package's LightningModule, with the same values always."""

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in "12"]
            self.net = nn.Sequential(*layers)
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("score", self.net(batch[0]).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> DataLoader:
            samples = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
            return DataLoader(TensorDataset(samples), batch_size=4)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    return Model()


def trainer_of(package: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"accelerator": "cpu", **SILENT, "max_epochs": 1}
    return package.Trainer(**(defaults | options))


def trained(package: Any, **options: Any) -> Any:
    model = model_of(package)
    trainer_of(package, **options).fit(model)
    return model


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_is_the_same_under_both_packages(name: str) -> None:
    options = STRATEGIES[name]
    mine, theirs = (trained(package, **options) for package in (pytorch_lightning, lightning))
    assert mine.losses == theirs.losses
    assert len(mine.losses) >= 3
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_checkpoints_callbacks_and_evaluation_under_pytorch_lightning(tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, monitor="score")
    shows = on_pytorch_lightning.profiling.HeldBytesTable()
    callbacks = [saves, EarlyStopping("score", stopping_threshold=1e9), shows]
    options = {"strategy": "zero3_in_process", "devices": 2}
    trainer = trainer_of(
        pytorch_lightning, **options, callbacks=callbacks, enable_checkpointing=True, max_epochs=3
    )
    model = model_of(pytorch_lightning)
    trainer.fit(model)
    assert trainer.current_epoch == 1  # the threshold was passed
    ((first,), (second,)) = trainer.validate(model), trainer.test(model, verbose=False)
    assert first == second == {"score": pytest.approx(trainer.callback_metrics["score"].item())}
    assert len(trainer.predict(model)) == 6  # of both ranks
    resumed = model_of(lightning)
    trainer_of(lightning, **options, max_epochs=2).fit(resumed, ckpt_path=saves.best_model_path)
    assert len(resumed.losses) == 3  # of the second epoch


def test_a_strategy_that_was_made_for_lightning_is_taken_with_its_options() -> None:
    strategy = lightning_shard.ZeRO3Strategy(backend="in_process", num_ranks=2, units=["Linear"])
    trainer = trainer_of(pytorch_lightning, strategy=strategy)
    assert trainer.strategy is strategy
    assert isinstance(strategy, pytorch_lightning.strategies.ParallelStrategy)
    assert isinstance(strategy, lightning_shard.ZeRO3Strategy)
    assert not isinstance(strategy, lightning_shard.ZeRO2Strategy)
    model = model_of(pytorch_lightning)
    trainer.fit(model)
    assert strategy.run.options.units == ["Linear"]
    reference = trained(lightning, strategy="zero3_in_process", devices=2)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    back = trainer_of(lightning, strategy=on_pytorch_lightning.ZeRO2Strategy())
    assert isinstance(back.strategy, lightning.strategies.ParallelStrategy)


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_a_strategy_of_another_trainer_is_made_anew_with_its_options(package: Any) -> None:
    """Forecasting packages give all their Trainers one object: "accelerator set through both"."""
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process", bucket_mb=2)
    options = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    model, trainer = model_of(package), trainer_of(package, **options)
    trainer.fit(model)
    other = trainer_of(package, **options)
    predicted = torch.cat(other.predict(model))
    assert trainer.strategy is strategy
    assert type(other.strategy) is type(strategy)
    assert other.strategy is not strategy
    assert other.strategy.run.options.bucket_mb == 2
    torch.testing.assert_close(predicted, torch.cat(trainer.predict(model)))


def test_a_class_derived_from_lightnings_strategy_is_told_what_to_import() -> None:
    class Mine(lightning_shard.ZeRO2Strategy):
        pass

    message = r"Mine .*pytorch_lightning.* lightning_shard\.on_pytorch_lightning\.ZeRO2Strategy"
    with pytest.raises(ConfigError, match=message):
        trainer_of(pytorch_lightning, strategy=Mine(backend="in_process"), devices=2)

    class Derived(on_pytorch_lightning.ZeRO2Strategy):
        pass

    trainer = trainer_of(pytorch_lightning, strategy=Derived(backend="in_process"), devices=2)
    assert type(trainer.strategy) is Derived


class MyCallback(lightning.Callback):
    pass


@pytest.mark.parametrize(
    ("callback", "advice"),
    [
        (MyCallback(), "derive it from pytorch_lightning.Callback"),
        (
            lightning.callbacks.StochasticWeightAveraging(1e-2),
            "import it from pytorch_lightning.callbacks",
        ),
        (
            lightning_shard.profiling.HeldBytesTable(),
            "import it from lightning_shard.on_pytorch_lightning.profiling",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callback_of_the_other_package_is_told_what_to_import(callback: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"is of lightning\.pytorch, .*: {advice}\."):
        trained(pytorch_lightning, strategy="zero3_in_process", devices=2, callbacks=[callback])


def test_the_command_line_of_pytorch_lightning_takes_the_strategies_by_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {
        "accelerator": "cpu",
        "devices": "2",
        "logger": "false",
        "strategy": "lightning_shard.ZeRO2Strategy",
        "strategy.backend": "in_process",
        "strategy.bucket_mb": "2",
    }
    arguments = [f"--trainer.{name}={value}" for name, value in options.items()]
    set_arguments(monkeypatch, "program", *arguments, "--seed_everything=0")
    cli = LightningCLI(type(model_of(pytorch_lightning)), run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is on_pytorch_lightning.ZeRO2Strategy
    assert cli.trainer.strategy.run.options.bucket_mb == 2


def test_the_mirror_has_all_modules_that_build_on_lightning() -> None:
    folder = Path(lightning_shard.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        if name.startswith(("lightning_shard.cli", mirror.MIRROR)):
            continue
        imports = _imports_of(path)
        builds = any(one.partition(".")[0] == "lightning" for one in imports)
        if mirror.mirrored(name) == name:
            needs = [one for one in imports if mirror.mirrored(one) != one]
            assert not builds, f"{name} imports Lightning: add it to mirror.BUILT_ON_LIGHTNING"
            assert not needs or name == "lightning_shard", f"{name} imports {needs}: likewise"
        else:
            module = import_module(mirror.mirrored(name))
            assert module.__file__ == str(path)
            _assert_is_built_on_pytorch_lightning(module)


def _imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _assert_is_built_on_pytorch_lightning(module: Any) -> None:
    for name, value in vars(module).items():
        home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
        package = str(home).partition(".")[0]
        assert package != "lightning", f"{module.__name__}.{name}"
        if str(home).startswith("lightning_shard."):
            assert mirror.mirrored(str(home)) == home, f"{module.__name__}.{name}"


def test_the_private_names_that_taking_a_counterpart_needs() -> None:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        path = f"{package}.trainer.connectors.accelerator_connector"
        connector = import_module(path)._AcceleratorConnector
        check = inspect.unwrap(connector._check_config_and_set_final_flags)
        assert "strategy" in inspect.signature(check).parameters
        assert "self._check_config_and_set_final_flags(" in inspect.getsource(connector.__init__)


IMPORTED_BEFORE = """
import sys
import pytorch_lightning
assert not [name for name in sys.modules if name.partition(".")[0] == "lightning"]
import lightning_shard
"""
IMPORTED_AFTER = """
import sys
import lightning_shard
heavy = {"torch", "lightning", "lightning_fabric", "pytorch_lightning"}
assert not heavy & set(sys.modules)
import pytorch_lightning
"""
THEN = """
from torch.distributed import Backend
assert "MPI4PY" in Backend._plugins and "IN_PROCESS" in Backend._plugins
trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy="zero3_in_process")
assert isinstance(trainer.strategy, pytorch_lightning.strategies.ParallelStrategy)
assert not [name for name in sys.modules if name.partition(".")[0] == "lightning"]
from lightning_shard import ZeRO3Strategy
import lightning.pytorch
assert issubclass(ZeRO3Strategy, lightning.pytorch.strategies.ParallelStrategy)
assert "zero3" in lightning.pytorch.strategies.StrategyRegistry
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [IMPORTED_BEFORE, IMPORTED_AFTER], ids=["before", "after"])
def test_the_order_of_the_imports_does_not_matter(first: str) -> None:
    check([run_alone("-c", first + THEN, timeout_seconds=250)])


SCRIPT = """
import sys, torch, pytorch_lightning, lightning_shard
from tests.test_on_pytorch_lightning import model_of, trainer_of

if __name__ == "__main__":
    model = model_of(pytorch_lightning)
    trainer_of(pytorch_lightning, strategy="zero3_gloo", devices=2).fit(model)
    if model.global_rank == 0:
        torch.save((model.losses, model.state_dict()), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fit_of_pytorch_lightning_on_two_processes(tmp_path: Path) -> None:
    script, result = tmp_path / "script.py", tmp_path / "result.pt"
    script.write_text(SCRIPT, encoding="utf-8")
    check([run_alone(str(script), str(result), timeout_seconds=250)])
    losses, weights = torch.load(result)
    reference = trained(lightning, strategy="zero3_in_process", devices=2)
    assert losses == pytest.approx(reference.losses)
    torch.testing.assert_close(weights, dict(reference.state_dict()))
