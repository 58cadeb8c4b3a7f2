"""Validations of ranks that train by themselves: weights that hooks swap, buffers that they set."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard import LocalSGDStrategy
from tests.checkpoint.saved_sections import own_parameters_in
from tests.strategies.async_sgd.test_async_sgd import SlowRank
from tests.strategies.local_sgd.local_training import (
    BATCH,
    Tiny,
    TinyData,
    assert_same_weights,
    tiny_data,
    weights_of,
)
from tests.strategies.local_updates import STRATEGIES, fit
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring("You're resuming from a checkpoint that ended before")


# --- hooks that swap weights for a validation ----------------------------------------------------


class Linear(Tiny):
    """Each gradient moves one bias by the same, in whatever order they are applied."""

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        return self.network(batch[0]).sum() * 0 + self.network[0].bias.sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("swapped", float(bool((self.network[0].weight == 7).all())), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Swap(L.Callback):
    """As an average of the weights over time is put in for a validation, by hand."""

    @torch.no_grad()
    def put_in(self, module: L.LightningModule) -> None:
        self.backup = [param.detach().clone() for param in module.parameters()]
        for param in module.parameters():
            param.fill_(7.0)

    @torch.no_grad()
    def take_out(self, module: L.LightningModule) -> None:
        for param, value in zip(module.parameters(), self.backup, strict=True):
            param.copy_(value)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.put_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.take_out(pl_module)


class SwappedByItself(Linear):
    """In the first hook of a validation, and in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.swap = Swap()

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.swap.put_in(self)

    def on_validation_model_train(self) -> None:
        self.train()
        self.swap.take_out(self)


class TwoLoaders(TinyData):
    def val_dataloader(self) -> Any:
        return [super(TwoLoaders, self).val_dataloader() for _ in range(2)]


VALIDATED = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", STRATEGIES)
def test_weights_swapped_for_a_validation_went_into_training(way: str) -> None:
    ends = []
    for module, callbacks in ((Linear(), []), (Linear(), [Swap()]), (SwappedByItself(), [])):
        trainer = quiet_trainer(
            strategy=STRATEGIES[way](),
            devices=2,
            max_steps=7,
            accumulate_grad_batches=1,
            gradient_clip_val=None,
            callbacks=[SlowRank(turns=60), *callbacks],
            **VALIDATED,
        )
        trainer.fit(module, datamodule=TwoLoaders(tiny_data(2 * BATCH * 7)))
        ends.append(weights_of(module))
        swapped = [float(value) for value in trainer.callback_metrics.values()]
        assert swapped == [float(len(ends) > 1)] * 2
    plain, *others = ends
    for other in others:
        assert_same_weights(other, plain)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", STRATEGIES)
def test_a_checkpoint_of_a_validation_with_swapped_weights_is_one_without(
    way: str, tmp_path: Path
) -> None:
    saved = []
    for name, callbacks in (("plain", []), ("swapped", [Swap()])):
        folder = tmp_path / name
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
        more = {"callbacks": [*callbacks, saver], "enable_checkpointing": True}
        fit(STRATEGIES[way](), Linear(), 2, 5, **more, **VALIDATED)
        files = sorted(folder.glob("*.ckpt"))
        saved.append([torch.load(file, weights_only=True) for file in files])
    assert [one["global_step"] for one in saved[0]] == [2, 4]
    for plain, swapped in zip(*saved, strict=True):
        assert_same_weights(swapped["state_dict"], plain["state_dict"])
        if way == "diloco":
            own = [own_parameters_in(one["lightning_shard"]) for one in (swapped, plain)]
            assert_same_weights(*own)
            assert own[0].keys() == plain["state_dict"].keys()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("way", STRATEGIES)
def test_a_validation_after_the_fit_sees_the_fitted_weights(way: str) -> None:
    trainer = fit(STRATEGIES[way](), module := Tiny(), 2, 4, **VALIDATED)
    fitted = weights_of(module)
    (metrics,) = trainer.validate(module, datamodule=TinyData(tiny_data(64)), verbose=False)
    assert metrics["val_loss"] > 0
    assert_same_weights(weights_of(module), fitted, rtol=0, atol=0)


# --- what a validation changes -------------------------------------------------------------------


class Calibrated(Tiny):
    """A validation sets one buffer, and a step another one, differently on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(2))
        self.register_buffer("running", torch.zeros(2))

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        self.running[0] += 1 + self.global_rank
        self.running[1] = float("nan")
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        assert self.running[0] == 3
        self.threshold.fill_(5.0)

    def on_validation_end(self) -> None:
        assert bool((self.threshold == 5).all())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # as they were before the validation
            assert self.running[0] == 2 * (1 + self.global_rank)
            assert bool(self.running[1].isnan())


def test_a_buffer_that_a_validation_had_set_was_set_back() -> None:
    strategy = LocalSGDStrategy(backend="in_process", sync_every=10)
    module = Calibrated()
    fit(strategy, module, 2, 3, **VALIDATED | {"num_sanity_val_steps": 0})
    assert module.threshold.tolist() == [5.0, 5.0]
