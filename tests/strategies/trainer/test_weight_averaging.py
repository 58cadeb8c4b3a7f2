"""Averages of weights in shards are a single device's: while training, in files and afterwards."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_shard import (
    ConfigError,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.processes import run_processes
from tests.strategies.parity import ignore_upstream_warnings, ignoring, quiet_trainer
from tests.strategies.stacks import WIDTH, Stack, trainer_of
from tests.strategies.stacks import Block as StackBlock
from tests.strategies.test_parity_evaluation import EvaluatedGPT, EvaluationBatches, seeded

pytestmark = ignoring(
    ".*microbatches are fewer than the",
    "You're resuming from a checkpoint that ended before",
    "Be aware that when using `ckpt_path`",
    ".*lr_scheduler.step.*",
    "Swapping scheduler",
)

STEPS, SAVED_AT = 6, 3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}  # in float64


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A strategy on so many ranks."""

    num_ranks: int = 1
    make: Callable[..., Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    backend: str = "in_process"

    def trainer(self, **options: Any) -> L.Trainer:
        strategy = (
            "auto" if self.make is None else self.make(backend=self.backend, **dict(self.options))
        )
        return quiet_trainer(strategy=strategy, devices=self.num_ranks, **options)


def hybrid(pp: int, tp: int, dp: int, stage: int, schedule: str = "1f1b") -> Scheme:
    options = {
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "zero_stage": stage,
        "schedule": schedule,
        "num_microbatches": 3,
    }
    return Scheme(
        num_ranks=pp * tp * dp, make=HybridParallelStrategy, options=tuple(options.items())
    )


SINGLE = Scheme()
QUICK = {"zero3": Scheme(num_ranks=3, make=ZeRO3Strategy)}
SCHEMES = QUICK | {
    "2x2x1 stage 1": hybrid(2, 2, 1, 1),
    "zero1": Scheme(num_ranks=2, make=ZeRO1Strategy),
    "zero2": Scheme(num_ranks=3, make=ZeRO2Strategy),
    "tensor": hybrid(1, 2, 1, 0),
    "tensor stage 3": hybrid(1, 2, 2, 3),
    "pipeline": hybrid(2, 1, 1, 0),
    "pipeline zbv": hybrid(2, 1, 1, 1, "zbv"),
    "2x2x2 stage 0": hybrid(2, 2, 2, 0),
    "2x2x2 stage 1": hybrid(2, 2, 2, 1),
    "2x2x2 stage 2": hybrid(2, 2, 2, 2),
    "2x2x2 stage 3": hybrid(2, 2, 2, 3),
    "two copies": Scheme(
        num_ranks=4,
        make=HybridParallelStrategy,
        options=(("data_parallel_size", (2, 2)), ("zero_stage", 2)),
    ),
}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=1),
    "mean": lambda: WeightAveraging(use_buffers=False),
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5)),
}


@dataclass
class Watch(Callback):
    """Records what validation gives, and saves in the middle of the run."""

    path: Path
    losses: list[float] = field(default_factory=list)
    local_numel: int = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        averaging = next(one for one in trainer.callbacks if isinstance(one, WeightAveraging))
        self.local_numel = sum(p.numel() for p in averaging._average_model.parameters())
        if trainer.global_step == SAVED_AT and not self.path.exists():
            trainer.strategy.barrier()
            trainer.save_checkpoint(self.path)


@dataclass
class Result:
    """What a run leaves."""

    validation: list[float]
    saved: dict[str, Any]
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    after: dict[str, Any]
    local_numel: int


def run(scheme: Scheme, kind: str, folder: Path, resume: Path | None = None) -> Result:
    """Fit, save in the middle, validate and save afterwards."""
    model = seeded(EvaluatedGPT, 32, 4).double()
    averaging, watch = CALLBACKS[kind](), Watch(folder / "middle.ckpt")
    trainer = scheme.trainer(
        callbacks=[averaging, watch],
        precision="64-true",
        max_steps=STEPS,
        val_check_interval=3,  # of two microbatches a step: in the middle of one, too
        limit_val_batches=2,
        num_sanity_val_steps=1,
    )
    data = EvaluationBatches(model, STEPS)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
    average = averaging._average_model.state_dict()
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    return Result(
        validation=[*watch.losses, validated["val_loss"]],
        saved=torch.load(watch.path, weights_only=True),
        weights=dict(model.state_dict()),
        average=average,
        after=torch.load(folder / "end.ckpt", weights_only=True),
        local_numel=watch.local_numel,
    )


@cache
def single_device(kind: str, folder: Path) -> Result:
    return run(SINGLE, kind, folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


def assert_same(got: Result, expected: Result) -> None:
    def close(ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, **TOLERANCE)

    assert len(expected.validation) > 2
    close(got.validation, expected.validation)
    close(got.weights, dict(expected.weights))
    close(dict(got.average), dict(expected.average))
    for ours, theirs in ((got.saved, expected.saved), (got.after, expected.after)):
        for key in ("state_dict", "current_model_state", "averaging_state"):
            close(dict(ours[key]), dict(theirs[key]))
    saved = expected.saved
    assert any(
        not torch.equal(value, saved["current_model_state"][name])
        for name, value in saved["state_dict"].items()
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in QUICK and kind == "ema" else pytest.mark.slow)
        for name in SCHEMES
        for kind in CALLBACKS
    ],
)
def test_averages_are_a_single_devices(
    name: str, kind: str, tmp_path: Path, reference: Path
) -> None:
    folder = reference / kind
    folder.mkdir(exist_ok=True)
    expected, scheme = single_device(kind, folder), SCHEMES[name]
    got = run(scheme, kind, tmp_path)
    assert_same(got, expected)
    if scheme.num_ranks > 2:
        assert got.local_numel < 0.8 * expected.local_numel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("2x2x2 stage 2", "zero3"),
        ("zero3", "tensor stage 3"),
        ("zero1", "2x2x2 stage 3"),
        ("single", "2x2x2 stage 0"),
        ("2x2x2 stage 3", "single"),
    ],
)
def test_a_run_goes_on_with_its_average_under_another_scheme(
    first: str, then: str, tmp_path: Path, reference: Path
) -> None:
    def go_on(saves: Scheme, resumes: Scheme, folder: Path) -> Result:
        for name in ("saved", "resumed"):
            (folder / name).mkdir(parents=True)
        run(saves, "ema", folder / "saved")
        middle = folder / "saved" / "middle.ckpt"
        return run(resumes, "ema", folder / "resumed", resume=middle)

    schemes = SCHEMES | {"single": SINGLE}
    got = go_on(schemes[first], schemes[then], tmp_path / "ranks")
    if then == "single":  # Lightning begins the data of the epoch anew
        assert_same(got, go_on(SINGLE, SINGLE, tmp_path / "one"))
        return
    (reference / "whole").mkdir(exist_ok=True)
    whole = single_device("ema", reference / "whole")
    assert_same(got, replace(whole, validation=whole.validation[-len(got.validation) :]))


def run_on_processes(folder: Path) -> Result:
    """Run on real processes, each of which must call."""
    ignore_upstream_warnings()
    warnings.filterwarnings("ignore", ".*microbatches are fewer than the")
    return run(replace(SCHEMES["2x2x1 stage 1"], backend="gloo"), "ema", folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_gloo_processes(tmp_path: Path) -> None:
    for name in ("one", "ranks"):
        (tmp_path / name).mkdir()
    expected = run(SINGLE, "ema", tmp_path / "one")
    for got in run_processes(run_on_processes, 4, timeout_seconds=500, folder=tmp_path / "ranks"):
        assert_same(got, expected)


class NormBlock(StackBlock):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class NormStack(Stack):
    block = NormBlock

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def fit_norms(callback: Callback, path: Path, **options: Any) -> dict[str, Any]:
    model = seeded(NormStack)
    trainer = trainer_of(callbacks=[callback], max_epochs=4, **options)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    states = [saved, *saved["callbacks"].values()]
    kept = ("state_dict", "current_model_state", "average_model_state")
    return {
        "validation": trainer.callback_metrics["val_loss"],
        "weights": dict(model.state_dict()),
        **{key: dict(one[key]) for one in states for key in kept if key in one},
    }


BUFFER_CALLBACKS: dict[str, Callable[[], Callback]] = {
    "ema of buffers": lambda: EMAWeightAveraging(decay=0.5),
    "mean without buffers": lambda: WeightAveraging(use_buffers=False),
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "ema of buffers" else pytest.mark.slow)
        for kind in BUFFER_CALLBACKS
    ],
)
def test_statistics_of_every_stage_are_averaged(kind: str, tmp_path: Path) -> None:
    def fit(**options: Any) -> dict[str, Any]:
        return fit_norms(BUFFER_CALLBACKS[kind](), tmp_path / "end.ckpt", **options)

    strategy = PipelineParallelStrategy(backend="in_process", num_microbatches=1)
    torch.testing.assert_close(fit(strategy=strategy, devices=2), fit(), rtol=1e-5, atol=1e-6)


class Unscheduled(EvaluatedGPT):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class SaveBetween(Callback):
    """Saves after two of four epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def fit_stochastic(scheme: Scheme, folder: Path, resume: Path | None = None) -> list[Any]:
    model = seeded(Unscheduled, 32, 4).double()
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer = scheme.trainer(
        callbacks=[averaging, SaveBetween(folder / "middle.ckpt")],
        precision="64-true",
        max_epochs=4,
        max_steps=-1,
        limit_train_batches=3,
        limit_val_batches=1,
    )
    trainer.fit(model, datamodule=EvaluationBatches(model, STEPS), ckpt_path=resume)
    average = averaging._average_model.state_dict()
    if resume is None:
        saved = torch.load(folder / "middle.ckpt", weights_only=True)
        (state,) = (s for k, s in saved["callbacks"].items() if k.startswith("Stochastic"))
        return [dict(d) for d in (model.state_dict(), average, state["average_model_state"])]
    return [dict(model.state_dict()), dict(average)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "zero3" else pytest.mark.slow) for name in SCHEMES],
)
def test_stochastic_averages_are_a_single_devices(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "ranks"]
    for folder in folders:
        folder.mkdir()
    torch.testing.assert_close(
        fit_stochastic(SCHEMES[name], folders[1]), fit_stochastic(SINGLE, folders[0]), **TOLERANCE
    )
    one, ranks = (folder / "middle.ckpt" for folder in folders)
    expected = fit_stochastic(SINGLE, tmp_path, one)
    torch.testing.assert_close(fit_stochastic(SINGLE, tmp_path, ranks), expected, **TOLERANCE)
    torch.testing.assert_close(fit_stochastic(SCHEMES[name], tmp_path, one), expected, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_validation_does_not_round_the_average(name: str) -> None:
    """A validation rounded the average to the format of forward."""

    def average(limit_val_batches: int) -> dict[str, Tensor]:
        model, averaging = seeded(EvaluatedGPT), EMAWeightAveraging(decay=0.999)
        trainer = SCHEMES[name].trainer(
            precision="bf16-mixed",
            callbacks=[averaging],
            max_steps=STEPS,
            val_check_interval=1,
            limit_val_batches=limit_val_batches,
        )
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))
        return dict(averaging._average_model.state_dict())

    torch.testing.assert_close(average(1), average(0), rtol=0, atol=0)


class Traffic(Callback):
    """Counts what a run sends after its first step."""

    sent = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        total = trainer.strategy.collectives.traffic.total_bytes
        self.first = total if trainer.global_step == 1 else self.first
        self.sent = total - self.first


def test_averaging_sends_nothing() -> None:
    def sent(callbacks: list[Callback]) -> int:
        model, traffic = seeded(EvaluatedGPT), Traffic()
        trainer = SCHEMES["zero1"].trainer(
            callbacks=[*callbacks, traffic],
            max_steps=3,
            accumulate_grad_batches=1,
            limit_val_batches=0,
        )
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))
        return traffic.sent

    assert sent([EMAWeightAveraging(decay=0.5)]) == sent([]) > 0


def by_the_norm(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average + (current - average) / (1 + average.norm())


@pytest.mark.parametrize(
    "callback",
    [WeightAveraging(avg_fn=by_the_norm), StochasticWeightAveraging(0.05, avg_fn=by_the_norm)],
    ids=lambda callback: type(callback).__name__,
)
def test_averages_of_full_weights_are_refused(callback: Callback) -> None:
    model = seeded(EvaluatedGPT)
    trainer = SCHEMES["zero2"].trainer(callbacks=[callback])
    with pytest.raises(ConfigError, match=r"does not treat each element by itself .*differently"):
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))


class Fails(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.strategy.mesh_rank == 1:
            raise RuntimeError("no space left")


def test_a_failed_run_leaves_no_average_in_shards() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    model, trainer = seeded(EvaluatedGPT), SCHEMES["zero2"].trainer(callbacks=[averaging, Fails()])
    with pytest.raises(RuntimeError, match="no space left"):
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))
    assert averaging._average_model is None
    assert not {"_swap_models", "on_load_checkpoint"} & vars(averaging).keys()


@pytest.mark.parametrize("name", ["zero3", pytest.param("2x2x2 stage 2", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*suggested_lr.*")
def test_a_tuner_puts_the_average_back(name: str, tmp_path: Path) -> None:
    model = seeded(EvaluatedGPT)
    model.lr = 1e-3
    averaging = EMAWeightAveraging(decay=0.5)
    trainer = SCHEMES[name].trainer(
        callbacks=[averaging], default_root_dir=tmp_path, accumulate_grad_batches=1
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = EvaluationBatches(model, STEPS)
    Tuner(trainer).lr_find(model, datamodule=data, num_training=4, update_attr=False)
    for key, value in averaging._average_model.module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_the_names_of_lightning_that_averages_in_shards_replace() -> None:
    """Lightning calls these where it goes through the module, and nothing else."""
    for name in ("_swap_models", "_copy_average_to_current", "on_load_checkpoint"):
        assert callable(getattr(WeightAveraging, name))
    for name in ("update_parameters", "transfer_weights"):
        assert callable(getattr(StochasticWeightAveraging, name))
    assert StochasticWeightAveraging(0.05)._avg_fn is StochasticWeightAveraging.avg_fn
    assert EMAWeightAveraging()._average_model is None
