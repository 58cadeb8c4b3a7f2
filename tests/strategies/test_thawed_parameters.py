"""Parameters that are frozen or thawed between steps train as on a single device."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback

from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import fit

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings("ignore:.*microbatches are fewer than the"),
]


class Thaws(OfRanks):
    """Frozen blocks that the optimizer has had from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[:2]:
            block.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks.requires_grad_(True)


class ThawsAndAdds(Thaws):
    """Frozen blocks that become a param group when they are thawed."""

    def configure_optimizers(self) -> Any:
        return OfRanks.configure_optimizers(self)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            thawed = [p for block in list(self.blocks)[:2] for p in block.parameters()]
            self.trainer.optimizers[0].add_param_group({"params": thawed, "lr": 0.05})


class Freezes(OfRanks):
    """A block that is frozen in every other step, between its batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].requires_grad_(batch_idx % 2 == 0)


class FreezesAfterBackward(OfRanks):
    """A block that has a gradient when it is frozen."""

    def on_after_backward(self) -> None:
        if self.global_step == 3:
            self.blocks[1].requires_grad_(False)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.05)


class Finetuned(OfRanks):
    def callbacks(self) -> list[Callback]:
        return [Finetuning()]


STYLES = [Thaws, ThawsAndAdds, Freezes, FreezesAfterBackward, Finetuned]
alone: Any = cache(fit)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("style", STYLES)
def test_parameters_frozen_or_thawed_in_mid_run_part_from_a_single_devices(
    style: type[OfRanks], scheme: str
) -> None:
    num_ranks, make = SCHEMES[scheme]
    got = fit(style, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(style).weights, rtol=1e-5, atol=2e-6)
