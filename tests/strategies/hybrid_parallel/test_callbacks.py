"""Lightning's callbacks do on stages of split layers what they do on a single device."""

import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MeanMetric

from tests.features.network import CountsBatches
from tests.strategies.parity import ignoring
from tests.strategies.test_parity_evaluation import EvaluatedGPT, EvaluationBatches, seeded
from tests.strategies.trainer.test_weight_averaging import SCHEMES, SINGLE, Scheme

pytestmark = ignoring(
    ".*microbatches are fewer than the", "Checkpoint directory .* exists and is not empty"
)

MESH = SCHEMES["2x2x2 stage 2"]
MESHES = [
    "2x2x1 stage 1",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("2x2x2 stage 2", "2x2x2 stage 3", "pipeline zbv")
    ),
]
STEPS = 2  # of an epoch
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Measured(EvaluatedGPT):
    """Has a metric of torchmetrics, and a learning rate that falls every epoch."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean(loss.detach(), weight=len(batch[0]))
        self.log("mean_loss", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-6)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@dataclass
class Watched:
    """What the callbacks have seen and done."""

    model: L.LightningModule
    trainer: L.Trainer
    folder: Path

    def report(self) -> dict[str, Any]:
        """Return all that does not depend on time or place."""
        by_type = {type(one): one for one in self.trainer.callbacks}
        best = by_type[ModelCheckpoint]
        last = torch.load(best.last_model_path, weights_only=True)
        scores = {Path(path).name: score for path, score in best.best_k_models.items()}
        return {
            "files": sorted(path.name for path in best_folder(self.folder).iterdir()),
            "best": Path(best.best_model_path).name,
            "scores": dict(sorted(scores.items())),
            "stopped": by_type[EarlyStopping].stopped_epoch,
            "wait": by_type[EarlyStopping].wait_count,
            "rates": [list(values) for values in by_type[LearningRateMonitor].lrs.values()],
            "batches": by_type[CountsBatches].batches,
            "steps": self.trainer.global_step,
            "epochs": self.trainer.current_epoch,
            "metric": self.trainer.callback_metrics["mean_loss"],
            "hooks": self.model.epochs_seen,
            "callbacks saved": sorted(key.split("{")[0] for key in last["callbacks"]),
            "last": dict(last["state_dict"]),
            "weights": dict(self.model.state_dict()),
        }


def best_folder(folder: Path) -> Path:
    return folder / "saved"


def fit(scheme: Scheme, folder: Path, max_epochs: int = 5, resume: Path | None = None) -> Watched:
    model = seeded(Measured).double()
    model.epochs_seen = []
    trainer = scheme.trainer(
        callbacks=[
            ModelCheckpoint(
                best_folder(folder), "{epoch}", monitor="val_loss", save_top_k=2, save_last=True
            ),
            EarlyStopping("val_loss", patience=2, min_delta=100.0),
            LearningRateMonitor("epoch"),
            GradientAccumulationScheduler({0: 1, 1: 2}),
            Timer(timedelta(hours=1)),
            LambdaCallback(
                on_train_epoch_end=lambda trainer, module: module.epochs_seen.append(
                    trainer.current_epoch
                )
            ),
            DeviceStatsMonitor(cpu_stats=False),
            CountsBatches(),
        ],
        precision="64-true",
        accumulate_grad_batches=1,
        max_epochs=max_epochs,
        max_steps=-1,
        enable_checkpointing=True,
        logger=CSVLogger(folder, version="run" if resume is None else "more"),
        log_every_n_steps=1,
        limit_train_batches=STEPS,
        limit_val_batches=1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.*")
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS), ckpt_path=resume)
    return Watched(model, trainer, folder)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if key in ("scores", "metric"):  # Lightning keeps these in fp32
            torch.testing.assert_close(got[key], value, rtol=1e-6, atol=0.0)
        elif key in ("rates", "last", "weights"):
            torch.testing.assert_close(got[key], value, **TOLERANCE)
        else:
            assert got[key] == value, key


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_callbacks_that_watch_save_and_stop(name: str, tmp_path: Path) -> None:
    got = fit(SCHEMES[name], tmp_path / "ranks").report()
    expected = fit(SINGLE, tmp_path / "one").report()
    assert expected["epochs"] == 3  # none was better than the first by 100
    assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_their_states_go_on_under_another_scheme(tmp_path: Path) -> None:
    def go_on(saves: Scheme, resumes: Scheme, folder: Path) -> dict[str, Any]:
        fit(saves, folder, max_epochs=2)
        return fit(resumes, folder, resume=best_folder(folder) / "last.ckpt").report()

    expected = go_on(SINGLE, SINGLE, tmp_path / "one")
    assert (expected["epochs"], expected["batches"]) == (3, 3 * STEPS)
    for number, (saves, resumes) in enumerate(((MESH, SINGLE), (SINGLE, MESH))):
        assert_same(go_on(saves, resumes, tmp_path / str(number)), expected)


class Noting(ModelSummary):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[Any, ...]] = []
        self.summarize = lambda _, *counts, **__: self.counts.append(counts[:2])


class WithExample(EvaluatedGPT):
    def __init__(self) -> None:
        super().__init__(32, 4)
        self.example_input_array = torch.zeros(2, 16, dtype=torch.long)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["2x2x1 stage 1", pytest.param("2x2x2 stage 3", marks=pytest.mark.slow)]
)
def test_a_summary_counts_the_parameters_of_all_ranks(name: str) -> None:
    """A summary counted the parameters of one rank."""
    model, summary = seeded(WithExample), Noting()
    trainer = SCHEMES[name].trainer(callbacks=[summary], max_steps=1, limit_val_batches=0)
    for _ in range(2):  # once for each fit
        trainer.fit(model, datamodule=EvaluationBatches(model, 2))
    numel = sum(param.numel() for param in model.parameters())
    assert summary.counts == [(numel, numel)] * 2


class Backboned(EvaluatedGPT):
    """Its blocks are frozen for an epoch."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    @property
    def backbone(self) -> torch.nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2x2x2 stage 2", "2x2x2 stage 3"])
def test_a_backbone_is_unfrozen(name: str) -> None:
    def weights(scheme: Scheme) -> dict[str, Tensor]:
        model = seeded(Backboned).double()
        trainer = scheme.trainer(
            callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)],
            precision="64-true",
            max_epochs=3,
            max_steps=-1,
            limit_train_batches=STEPS,
            limit_val_batches=0,
        )
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))
        return dict(model.state_dict())

    torch.testing.assert_close(weights(SCHEMES[name]), weights(SINGLE), **TOLERANCE)


class RankZeroClock(Timer):
    """Its time is over on rank 0 alone."""

    def time_elapsed(self, *_: Any) -> float:
        return 0.0 if not self.trainer.is_global_zero or self.trainer.global_step < 2 else 1.0

    def setup(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.trainer = trainer
        super().setup(trainer, *args, **kwargs)


@pytest.mark.slow
def test_ranks_stop_together_when_time_is_over() -> None:
    model = seeded(EvaluatedGPT, 32, 4)
    trainer = SCHEMES["2x2x1 stage 1"].trainer(
        callbacks=[RankZeroClock(timedelta(seconds=1))], limit_val_batches=0
    )
    trainer.fit(model, datamodule=EvaluationBatches(model, 2 * STEPS))
    assert trainer.global_step == 2


@pytest.mark.parametrize("name", ["zero1", "2x2x1 stage 1"])
def test_a_search_for_the_batch_size_is_refused(name: str) -> None:
    model = seeded(EvaluatedGPT, 32, 4)
    trainer = SCHEMES[name].trainer(callbacks=[BatchSizeFinder()], limit_val_batches=0)
    with pytest.raises(MisconfigurationException, match="not supported with distributed"):
        trainer.fit(model, datamodule=EvaluationBatches(model, STEPS))
