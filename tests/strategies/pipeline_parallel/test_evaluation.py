"""Validation, test, prediction, logs and the callbacks of a run on the stages of a pipeline."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_shard.errors import ConfigError
from tests.strategies.parity import ignoring
from tests.strategies.stacks import (
    ALL_PIPELINES,
    BATCH,
    PIPELINES,
    Stack,
    check,
    fit,
    pipeline,
    samples,
    trainer_of,
)

pytestmark = ignoring(
    ".* microbatches are fewer than the",
    # What is logged is right on every rank without it.
    ".*It is recommended to use `self.log",
)


class Evaluated(Stack):
    """Two validation loaders, of which the second needs no network; metrics and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.test_accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("samples", float(len(logits)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"a": loss.detach() * 2, "b": batch_idx})
        return loss

    def val_dataloader(self) -> Any:
        return [
            DataLoader(TensorDataset(*samples(num, seed)), batch_size=BATCH) for num, seed in SETS
        ]

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 1:
            self.log("mean_input", batch[0].mean())
            return
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        logits = self(batch[0])
        self.test_accuracy.update(logits, batch[1])
        self.log("test_loss", F.cross_entropy(logits, batch[1]))
        self.log("test_accuracy", self.test_accuracy)
        return logits

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "classes": logits.argmax(1), "name": f"batch {batch_idx}"}


SETS = [(20, 2), (15, 3)]


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_fit_logs_and_validates_as_a_single_device(num_ranks: int, schedule: str) -> None:
    alone, _ = check(Evaluated, num_ranks, schedule)
    assert {
        "loss_step",
        "loss_epoch",
        "accuracy",
        "largest",
        "samples",
        "a",
        "b",
        "val_loss",
    } < set(alone.trainer.callback_metrics)


def results(trainer: L.Trainer, model: L.LightningModule) -> tuple[Any, ...]:
    validated, tested = (run(model, verbose=False) for run in (trainer.validate, trainer.test))
    predicted = [batch for loader in trainer.predict(model) or [] for batch in loader]
    names = [batch.pop("name") for batch in predicted]
    assert names == ["batch 0", "batch 1"] * len(SETS)
    return validated, tested, predicted


@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
def test_evaluation_without_a_fit(num_ranks: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = Evaluated()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = results(trainer_of(), model)
    got = results(trainer_of(pipeline(num_ranks, schedule)), model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


class Predicted(L.Callback):
    """What each rank's callbacks are given."""

    def __init__(self) -> None:
        self.mine: list[Any] = []
        self.ranks: list[Any] = []

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.mine.append(outputs)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.mine.append(outputs)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self.ranks = trainer.strategy.collectives.all_gather_object(self.mine)

    on_test_end = on_predict_end


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["predict", "test"])
def test_callbacks_of_every_rank_get_all_outputs_in_order(kind: str) -> None:
    torch.manual_seed(0)
    model, seen = Evaluated(), Predicted()
    loader = model.val_dataloader()[0]
    options = {"verbose": False} if kind == "test" else {}
    trainer = trainer_of(pipeline(4, "1f1b"), callbacks=[seen])
    getattr(trainer, kind)(model, loader, **options)
    expected = [model(batch[0]).detach() for batch in loader]
    assert len(seen.ranks) == 4
    for rank in seen.ranks:
        got = [one["logits"] if kind == "predict" else one for one in rank]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class OfEveryRank(L.Callback):
    """After each epoch, what each rank's callbacks decide by."""

    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = {
            name: value.item()
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("norm")
        }
        mine = (metrics, trainer.should_stop, trainer.global_step)
        self.epochs.append(trainer.strategy.collectives.all_gather_object(mine))


@pytest.mark.slow
def test_callbacks_that_watch_stop_and_save_on_every_rank_alike(tmp_path: Any) -> None:
    gather = OfEveryRank()
    best = ModelCheckpoint(tmp_path / "saved", "best", monitor="val_loss")

    class Watched(Evaluated):
        def callbacks(self) -> Any:
            stopper = EarlyStopping("val_loss", patience=0, min_delta=100.0)
            return [stopper, best, gather, LearningRateMonitor("step")]

    staged = fit(
        Watched,
        pipeline(2, "zbv"),
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        max_epochs=5,
        log_every_n_steps=1,
    )
    assert staged.trainer.current_epoch == 2  # the second epoch was not better by 100
    for ranks in gather.epochs:
        assert ranks[0] == ranks[1]
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in staged.model.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_the_callers_module_is_full_and_free_after_a_fit(num_ranks: int, schedule: str) -> None:
    torch.manual_seed(0)
    fresh = Evaluated()
    staged = fit(Evaluated, pipeline(num_ranks, schedule))
    model = staged.model
    assert [type(one) for one in model.modules()] == [type(one) for one in fresh.modules()]
    assert [sorted(vars(one)) for one in model.blocks] == [sorted(vars(b)) for b in fresh.blocks]
    for (name, param), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert param.shape == expected.shape, name
        assert param.is_leaf
        assert param.requires_grad
        assert param.grad is None
        state = staged.trainer.optimizers[0].state[param]
        assert state["momentum_buffer"].shape == param.shape
    loss = model.loss(samples(6))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.slow
def test_two_fits_of_one_module() -> None:
    def fit_twice(*strategies: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        for strategy in strategies:
            trainer_of(strategy).fit(model)
        return dict(model.state_dict())

    torch.testing.assert_close(
        fit_twice(pipeline(2, "1f1b"), pipeline(4, "gpipe"), "auto", pipeline(2, "zbv")),
        fit_twice("auto", "auto", "auto", "auto"),
        rtol=1e-5,
        atol=2e-7,
    )


class EndsEarly(Stack):
    """Evaluates the first two of its blocks."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first, second, *_ = self.blocks
        self.log("val_loss", self.head(second(first(self.embed(batch[0])))).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second, *_ = self.blocks
        return self.head(second(first(self.embed(batch[0]))))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = val_dataloader


@pytest.mark.parametrize("entry", ["fit", "validate", "predict"])
def test_an_evaluation_that_leaves_out_a_stages_blocks_is_refused_by_name(entry: str) -> None:
    """Each rank then ran all of it, on weights that it lacked: torch's error of their shapes."""
    trainer = trainer_of(pipeline(2, "1f1b"))
    with pytest.raises(ConfigError, match=r"ended without calling the block .blocks.2. of stage 1"):
        getattr(trainer, entry)(EndsEarly())
