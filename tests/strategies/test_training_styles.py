"""Styles of Lightning training, each against a single device on the same global batches."""

import copy
import warnings
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.errors import ShardError

from .styles import (
    AUTOMATIC,
    MANUAL,
    Automatic,
    Backbone,
    Manual,
    check,
    fit_twice,
    make_trainer,
    ranks,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated"),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("style", [*AUTOMATIC, *MANUAL])
@pytest.mark.parametrize("stage", range(4))
def test_styles(style: type[Automatic], stage: int) -> None:
    check(style, ranks(stage))


@pytest.mark.slow
@pytest.mark.parametrize("style", [*AUTOMATIC, *MANUAL])
@pytest.mark.parametrize("stage", range(4))
def test_styles_on_three_ranks(style: type[Automatic], stage: int) -> None:
    check(style, ranks(stage, num_ranks=3))


class BackboneWithState(Backbone):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_finetuning_takes_no_empty_shard_for_another(num_ranks: int) -> None:
    """It looks by `torch.equal` for parameters that the optimizer has: ranks' groups differed."""

    def state(strategy: Any) -> dict[str, Any]:
        return train(BackboneWithState, strategy).trainer.optimizers[0].state_dict()

    joined, expected = state(ranks(3, num_ranks)), state("auto")
    assert [len(group["params"]) for group in joined["param_groups"]] == [4, 12]
    torch.testing.assert_close(joined["state"], expected["state"], rtol=1e-4, atol=1e-6)


class LimitedMemory(Automatic):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_lbfgs_without_sharding() -> None:
    check(LimitedMemory, ranks(0))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lbfgs_with_sharding_is_refused(stage: int) -> None:
    with pytest.raises(ShardError, match=r"LBFGS.*shard_ddp"):
        train(LimitedMemory, ranks(stage))


class OwnClipping(Automatic):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class OwnClippingManual(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [OwnClipping, OwnClippingManual])
@pytest.mark.parametrize("stage", range(4))
def test_torch_clipping_is_right_or_refused(style: type[Automatic], stage: int) -> None:
    try:
        check(style, ranks(stage))
    except ShardError:
        return


class ModuleZeroGrad(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        self.optimizers().step()


class WassersteinCritic(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        optimizer.step()
        for param in self.parameters():
            param.data.clamp_(-0.3, 0.3)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("style", [ModuleZeroGrad, WassersteinCritic])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_and_weights_changed_by_hand(style: type[Automatic], stage: int) -> None:
    check(style, ranks(stage))


class Averaged(Automatic):
    options: ClassVar = {"max_epochs": 4}

    def callbacks(self) -> list[Callback]:
        return [StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)]


class MovingAverage(Automatic):
    def callbacks(self) -> list[Callback]:
        return [EMAWeightAveraging(decay=0.5)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [Averaged, MovingAverage])
@pytest.mark.parametrize("stage", range(4))
def test_weight_averaging(style: type[Automatic], stage: int) -> None:
    check(style, ranks(stage))


class SkipsSteps(Automatic):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch[0])
        return None if batch_idx % 2 else loss


def test_lightning_refuses_skipped_steps_on_several_ranks() -> None:
    with pytest.raises(RuntimeError, match="Skipping the `training_step` by returning None"):
        train(SkipsSteps, ranks(2))


class Copies(Automatic):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.record(copy.deepcopy(self.net)(torch.ones(2, 4)).sum())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("stage", range(3))
def test_copies_during_training(stage: int) -> None:
    check(Copies, ranks(stage))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_two_fits_of_one_module(stage: int) -> None:
    torch.testing.assert_close(
        fit_twice(lambda: ranks(stage)), fit_twice(lambda: "auto"), rtol=1e-4, atol=1e-6
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("callback", [ModelSummary, RichModelSummary])
@pytest.mark.parametrize("stage", range(4))
def test_model_summaries_count_full_parameters(
    callback: type[ModelSummary], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    monkeypatch.setattr(callback, "summarize", staticmethod(lambda *row, **_: counts.append(row)))
    model = Automatic()
    make_trainer(ranks(stage), [callback()]).fit(model)
    total = sum(param.numel() for param in model.parameters())
    assert [row[1:3] for row in counts] == [(total, total)]  # all, and those that are trained


def test_learning_rates_are_monitored(tmp_path: Any) -> None:
    class Scheduled(Automatic):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    monitor = LearningRateMonitor("epoch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the intervals of a very short run's logs
        make_trainer(ranks(3), [monitor], logger=CSVLogger(tmp_path)).fit(Scheduled())
    assert monitor.lrs == {"lr-SGD": [0.1, 0.05]}
