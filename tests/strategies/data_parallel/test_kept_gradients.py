"""What user code keeps of `.grad` stays what it was when the next gradients come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.features.columns import COLUMNS, Here
from tests.features.network import fitted
from tests.strategies.parity import ignoring

pytestmark = ignoring()


def raised_with(grad: Tensor) -> ValueError:
    try:
        raise ValueError(grad.shape)
    except ValueError as error:
        return error


def of_frame(error: Any) -> Tensor:
    grad: Tensor = error.__traceback__.tb_frame.f_locals["grad"]
    return grad


WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda grad: [grad], lambda kept: kept[0]),
    "closure": (lambda grad: lambda: grad, lambda kept: kept()),
    "traceback": (raised_with, of_frame),
    "view": (lambda grad: grad.view(-1), torch.clone),
    "detached": (Tensor.detach, torch.clone),
    "row": (lambda grad: grad[0], torch.clone),
    "numpy": (lambda grad: grad.numpy(), torch.as_tensor),
}


class Keeps(Callback):
    """Keeps a gradient of the second step, and notes where gradients lie."""

    def __init__(self, way: str | None) -> None:
        self.way = way
        self.addresses: set[int] = set()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        grad = pl_module.head.weight.grad
        self.addresses.add(grad.data_ptr())
        if trainer.global_step == 1 and self.way is not None:
            self.kept = WAYS[self.way][0](grad)
            self.before = self.shown().clone()

    def shown(self) -> Tensor:
        assert self.way is not None
        shown: Tensor = WAYS[self.way][1](self.kept)
        return shown


def trained(way: str | None, folder: Path) -> Keeps:
    keeps = Keeps(way)
    here = Here(COLUMNS["shard_ddp"], folder)
    fitted(here, callbacks=[keeps], max_epochs=1, limit_val_batches=0)
    return keeps


@pytest.mark.parametrize("way", WAYS)
def test_a_view_of_a_gradient_that_is_kept_stays(way: str, tmp_path: Path) -> None:
    """A view of a gradient that was kept became the next."""
    keeps = trained(way, tmp_path)
    assert torch.equal(keeps.shown(), keeps.before)


def test_gradients_that_nobody_keeps_stay_in_one_memory(tmp_path: Path) -> None:
    assert len(trained(None, tmp_path).addresses) == 1
