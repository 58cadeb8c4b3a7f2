"""Pruning in a fit, by torch's functions and Lightning's callback, and resuming such a fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn
from torch.nn.utils import prune

from lightning_shard import ConfigError, DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from tests.strategies.decoders import Decoder, assert_as_alone, fit_decoder
from tests.strategies.parity import Curve, ignoring
from tests.strategies.stacks import Fitted, Stack, fit, trainer_of

pytestmark = ignoring(".*microbatches are fewer than the", "The dirpath has changed")

WHOLE = ["shard_ddp", "zero2", "zero3", "context", "context_zero3"]
SPLIT = ["tensor", "tensor_zero3", "pipeline", "2x2x2"]


class Seeded(ModelPruning):
    """Draws what it draws alike on one device and on ranks."""

    def apply_pruning(self, amount: float) -> None:
        torch.manual_seed(5)
        super().apply_pruning(amount)


PRUNINGS: dict[str, Callable[[], ModelPruning]] = {
    "lottery ticket": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "trained values": lambda: ModelPruning(
        "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False
    ),
    "drawn first values": lambda: Seeded("l1_unstructured", amount=0.3, resample_parameters=True),
    "layer by layer": lambda: ModelPruning(
        "l1_unstructured", amount=0.3, use_global_unstructured=False, parameter_names=["weight"]
    ),
    "rows": lambda: ModelPruning(
        "ln_structured",
        amount=0.3,
        use_global_unstructured=False,
        pruning_dim=0,
        pruning_norm=2,
    ),
    "at random": lambda: Seeded("random_unstructured", amount=0.3),
    "kept as masks": lambda: ModelPruning(
        "l1_unstructured", amount=0.3, make_pruning_permanent=False
    ),
}


class Pruned(Decoder):
    pruning = "lottery ticket"

    def configure_callbacks(self) -> list[Any]:
        made = PRUNINGS[self.pruning]()
        if self.pruning == "rows":  # of matrices alone
            layers = [one for one in self.modules() if isinstance(one, nn.Linear)]
            made._parameters_to_prune = [(one, "weight") for one in layers]
        return [made]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", WHOLE)
@pytest.mark.parametrize("pruning", PRUNINGS)
def test_a_fit_that_prunes_is_a_single_devices(pruning: str, scheme: str) -> None:
    """Pruning in a fit was refused under every strategy."""
    assert_as_alone(type("", (Pruned,), {"pruning": pruning}), scheme)


@pytest.mark.parametrize("scheme", SPLIT)
def test_pruning_is_refused_before_a_fit_that_splits_the_model(scheme: str) -> None:
    with pytest.raises(ConfigError, match="ModelPruning takes parameters out of their modules"):
        fit_decoder(Pruned, scheme)


class PrunesAndKeeps(Decoder):
    """Prunes by hand, in the middle of an epoch, and goes on with the masks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            prune.ln_structured(self.blocks[1].up, "weight", amount=0.5, n=2, dim=0)
            prune.random_unstructured(self.head, "weight", amount=0)
            prune.custom_from_mask(self.head, "bias", mask=torch.arange(len(self.head.bias)) > 2)
        if self.global_step == 7:
            prune.remove(self.head, "bias")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", WHOLE)
def test_masks_that_hooks_make_and_remove_are_a_single_devices(scheme: str) -> None:
    assert_as_alone(PrunesAndKeeps, scheme)


STRATEGIES = [DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy]


class PrunedStack(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def pruned_fit(strategy: Any, folder: Path, max_epochs: int, path: Path | None = None) -> Any:
    torch.manual_seed(0)
    model, curve = PrunedStack(), Curve()
    saves = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_on_train_epoch_end=True)
    trainer = trainer_of(
        strategy,
        callbacks=[curve, PRUNINGS["trained values"](), saves],
        devices=1 if strategy == "auto" else 2,
        max_epochs=max_epochs,
        enable_checkpointing=True,
    )
    trainer.fit(model, ckpt_path=path)
    return Fitted(model=model, trainer=trainer, curve=curve)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pruned_fit_goes_on_from_its_checkpoint(
    strategy: Any, checkpoint_format: str, tmp_path: Path
) -> None:
    """A folder has the optimizer's states under the pruned names, the weights under the others."""
    options: Any = {"backend": "in_process", "checkpoint_format": checkpoint_format}
    alone = pruned_fit("auto", tmp_path / "alone", 2)
    resumed_alone = pruned_fit("auto", tmp_path / "alone2", 4, tmp_path / "alone/epoch=1.ckpt")
    got = pruned_fit(strategy(**options), tmp_path / "ranks", 2)
    resumed = pruned_fit(strategy(**options), tmp_path / "2", 4, tmp_path / "ranks/epoch=1.ckpt")
    for one, other in ((got, alone), (resumed, resumed_alone)):
        torch.testing.assert_close(one.curve.losses, other.curve.losses)
        torch.testing.assert_close(one.weights, other.weights)


class RemembersSigns(Stack):
    """Makes buffers of what it computes from weights."""

    def on_train_epoch_end(self) -> None:
        weight = self.blocks[1].layer.weight.detach()
        self.register_buffer("was", weight.clone())
        self.register_buffer("signs", weight > 0)
        self.register_buffer("rows", weight[:2].clone())


def test_a_folder_has_buffers_that_were_computed_from_shards(tmp_path: Path) -> None:
    """Only rank 0 gave them to the folder, so that they could not be put together."""
    saves = ModelCheckpoint(dirpath=tmp_path, filename="one", save_on_train_epoch_end=True)
    strategy = ZeRO3Strategy(backend="in_process", checkpoint_format="sharded")
    got = fit(RemembersSigns, strategy, [saves], devices=2, enable_checkpointing=True)
    consolidate(tmp_path / "one.ckpt", tmp_path / "full.ckpt")
    state = torch.load(tmp_path / "full.ckpt")["state_dict"]
    torch.testing.assert_close(state, got.weights)
    torch.testing.assert_close(state, fit(RemembersSigns).weights)
