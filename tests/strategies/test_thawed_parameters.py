"""Parameters that are frozen or thawed between steps train as on a single device."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ZeRO2Strategy
from lightning_shard.errors import CheckpointError
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import fit, trainer_of

pytestmark = ignoring(".*microbatches are fewer than the")


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


class ThawsAll(Thaws):
    """Everything is frozen until the first epoch begins, and most of it in that one."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.head.requires_grad_(True)


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


STYLES = [Thaws, ThawsAndAdds, ThawsAll, Freezes, FreezesAfterBackward, Finetuned]
alone: Any = cache(fit)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("style", STYLES)
def test_parameters_frozen_or_thawed_in_mid_run_part_from_a_single_devices(
    style: type[OfRanks], scheme: str
) -> None:
    """One that is all frozen at the start was refused before it could be thawed."""
    num_ranks, make = SCHEMES[scheme]
    got = fit(style, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(style).weights, rtol=1e-5, atol=2e-6)


class AddsInStages(BaseFinetuning):
    """Takes one layer after the other into the optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if 1 <= epoch <= 2:
            block = pl_module.blocks[2 * epoch - 2 : 2 * epoch]
            self.unfreeze_and_add_param_group(block, optimizer, lr=0.05 / epoch)


class AddsWhenItBegins(Callback):
    """Has groups of its own, which it gives to the optimizer before the state comes back."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        params = list(pl_module.blocks.requires_grad_(True).parameters())
        trainer.optimizers[0].add_param_group({"params": params, "lr": 0.05})

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.blocks.requires_grad_(False)


class Tuned(OfRanks):
    tunes: ClassVar[type[Callback]]

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.Adam(params, lr=0.01)

    def callbacks(self) -> list[Callback]:
        return [self.tunes()]


class TunedBackbone(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def callbacks(self) -> list[Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]


class TunedInStages(Tuned):
    tunes = AddsInStages


class TunedAtStart(Tuned):
    tunes = AddsWhenItBegins


@cache
def resumed(style: type[Tuned], scheme: str, kept: str = "full") -> dict[str, Tensor]:
    """Return the weights after four epochs, of which the last two were resumed."""
    num_ranks, make = SCHEMES.get(scheme, (1, lambda **_: "auto"))
    if kept == "sharded":
        make = partial(ZeRO2Strategy, backend="in_process", checkpoint_format=kept)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "two_epochs.ckpt"
        fit(style, make(), devices=num_ranks).trainer.save_checkpoint(path)
        torch.manual_seed(0)
        model = style()
        trainer = trainer_of(make(), max_epochs=4, devices=num_ranks, callbacks=model.callbacks())
        trainer.fit(model, ckpt_path=path, weights_only=False)
    return dict(model.state_dict())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("style", [TunedBackbone, TunedInStages, TunedAtStart])
def test_a_run_whose_hooks_add_groups_resumes_as_on_a_single_device(
    style: type[Tuned], scheme: str
) -> None:
    """The groups were compared before `on_fit_start`, which brings back those of the saved run."""
    got = resumed(style, scheme)
    torch.testing.assert_close(got, resumed(style, "alone"), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_a_run_whose_hooks_add_groups_resumes_from_a_folder() -> None:
    """The names in the groups were compared before `on_fit_start`, too."""
    got = resumed(TunedInStages, "zero2", "sharded")
    torch.testing.assert_close(got, resumed(TunedInStages, "zero2"))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used")
def test_groups_that_no_hook_brings_back_are_refused_once_the_hooks_have_run(
    tmp_path: Path,
) -> None:
    """What a hook may still change is put off, and says that weights were loaded."""

    class AddsNothing(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pass

    make = SCHEMES["zero3"][1]
    fit(TunedInStages, make(), devices=2).trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    trainer = trainer_of(make(), max_epochs=4, devices=2, callbacks=[AddsNothing()])
    with pytest.raises(
        CheckpointError,
        match=r"only its weights were loaded: .* \[4, 8\] parameters, expected \[20\]",
    ):
        trainer.fit(OfRanks(), ckpt_path=tmp_path / "tuned.ckpt", weights_only=False)


class UsedOnce(BoringModel):
    """A layer that one rank's first micro-batch uses alone, and that is frozen in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(32, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 8), batch_size=2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rare.requires_grad_(batch_idx == 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean()
        uses = batch_idx == 0 and self.trainer.strategy.global_rank == 0
        return loss + self.rare(batch).mean() if uses else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class UsedOnceAndSeen(UsedOnce):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.rare.bias.grad is not None


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["shard_ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("style", [UsedOnce, UsedOnceAndSeen])
def test_a_gradient_of_one_rank_reaches_all_where_its_layer_is_frozen_next(
    style: type[UsedOnce], name: str
) -> None:
    """Other ranks passed over what they could not use any more, and hooks had it averaged twice."""
    trainer = quiet_trainer(
        strategy=f"{name}_in_process",
        devices=2,
        max_steps=1,
        accumulate_grad_batches=2,
        gradient_clip_val=None,
    )
    module = style()
    before = module.rare.bias.detach().clone()
    trainer.fit(module)
    change = module.rare.bias.detach() - before
    torch.testing.assert_close(change, torch.full((2,), -1 / 2 / 2 / 2))  # of 2 outputs
