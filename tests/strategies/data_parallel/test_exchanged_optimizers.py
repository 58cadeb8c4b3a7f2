"""Optimizers that a hook puts in the place of those of `configure_optimizers`, during the fit."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_shard import ConfigError
from tests.features.columns import COLUMNS, ONE_DEVICE, Column, Here
from tests.features.network import Network, fitted, weights
from tests.strategies.parity import ignoring

pytestmark = ignoring(".*loading dataloaders .*checkpoint")


class Exchanges(Callback):
    """Trains the head alone by another optimizer for two steps, then goes back to the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.first = trainer.optimizers
            trainer.optimizers = [torch.optim.SGD(pl_module.head.parameters(), 0.01, momentum=0.5)]
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.folder / "head.ckpt")
            trainer.strategy.optimizers = self.first


class OfTheHead(Network):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.01, momentum=0.5)


def trained(column: Column, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights of a fit, and of one that resumes while the other optimizer trains."""
    here, module, resumed = Here(column, folder / column.name), Network(), OfTheHead()
    fitted(here, module, callbacks=[Exchanges(here.folder)])
    fitted(here, resumed, ckpt_path=here.folder / "head.ckpt")
    return [weights(module), weights(resumed)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["zero2", "zero3", "pipeline_parallel"])
def test_an_exchanged_optimizer_met_shards_as_if_they_were_all(name: str, tmp_path: Path) -> None:
    got, expected = trained(COLUMNS[name], tmp_path), trained(ONE_DEVICE, tmp_path)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class Exchanged(Callback):
    def __init__(self, make: Any) -> None:
        self.make = make

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers = [self.make(trainer.global_rank)(pl_module.parameters(), lr=0.1)]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "kinds", "message"),
    [
        ("local_sgd", ("SGD", "SGD"), "works with those that configure_optimizers has returned"),
        ("elastic", ("SGD", "SGD"), "works with those that configure_optimizers has returned"),
        ("zero2", ("SGD", "Adam"), "SGD.* on rank 0 and .*Adam.* on rank 1"),
        ("zero2", ("LBFGS", "LBFGS"), "LBFGS does not update each element by itself"),
    ],
)
def test_an_exchanged_optimizer_that_cannot_be_right_is_refused(
    name: str, kinds: tuple[str, str], message: str, tmp_path: Path
) -> None:
    exchanged = Exchanged(lambda rank: getattr(torch.optim, kinds[rank]))
    with pytest.raises(ConfigError, match=message):
        fitted(Here(COLUMNS[name], tmp_path), callbacks=[exchanged])
