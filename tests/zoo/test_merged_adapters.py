"""peft's adapters that hooks merge, part again, or unload: as on one device."""

from typing import Any

import pytest
import torch

from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import UpAndDown, fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),  # the first import of the package takes long
    pytest.mark.filterwarnings("ignore"),  # those of the package
]


class Adapted(OfRanks):
    """Has an adapter on each layer of its blocks, and merges in one of its hooks."""

    block = UpAndDown

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        config = LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False)
        self.blocks: Any = get_peft_model(self.blocks, config)  # type: ignore[arg-type]
        self.head.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in getattr(self.blocks, "model", self.blocks):
            x = block(x)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.Adam(trained, lr=0.005)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


class MergesToValidate(Adapted):
    def on_validation_start(self) -> None:
        self.blocks.merge_adapter()

    def on_validation_end(self) -> None:
        self.blocks.unmerge_adapter()


class MergesBetweenSteps(Adapted):
    def on_train_batch_end(self, *_: Any) -> None:
        self.blocks.merge_adapter()
        self.blocks.unmerge_adapter()


class Unloads(Adapted):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.blocks = self.blocks.merge_and_unload()


@pytest.mark.parametrize("stage", ["shard_ddp", "zero2", "zero3"])
@pytest.mark.parametrize("style", [MergesToValidate, MergesBetweenSteps, Unloads])
def test_adapters_are_merged_as_on_one_device(style: type[Adapted], stage: str) -> None:
    """Parameters that an adapter's layer gave back to its module were refused by name."""
    got, alone = fit(style, f"{stage}_in_process", devices=2), fit(style)
    torch.testing.assert_close(got.curve.losses, alone.curve.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-5, atol=1e-5)
