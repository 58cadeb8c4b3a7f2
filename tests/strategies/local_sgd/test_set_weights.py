"""Weights that user code sets while ranks train by themselves: they stay, and are no gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_shard import ConfigError
from tests.strategies.local_sgd.local_training import (
    BATCH,
    ByHand,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    tiny_data,
    trainer_of,
    weights_of,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring("You're resuming from a checkpoint that ended before")

DILOCO = {"outer_optimizer": "nesterov", "sync_every": 3}
WAYS: dict[str, dict[str, Any]] = {
    "average": {"sync_every": 4},
    "average, overlapped": {"sync_every": 3, "overlap_steps": 1},
    "diloco": DILOCO,
    "diloco after each step": DILOCO | {"sync_every": 1},
    "diloco, streaming": DILOCO | {"fragments": 2, "overlap_steps": 1},
    "diloco, int8": DILOCO | {"compression": "int8"},
}
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
)
VALIDATED = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
Value = float | Callable[[Tensor], Tensor]


class Sets(L.Callback):
    """Sets the first layer's weight in a hook, at some numbers of steps."""

    def __init__(self, hook: str, steps: set[int], value: Value = 1.0) -> None:
        self.steps, self.value = steps, value
        setattr(self, hook, self.set)

    @torch.no_grad()
    def set(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            weight = pl_module.network[0].weight
            weight.data.copy_(self.value(weight) if callable(self.value) else weight * 0 + 1)


def fit(
    options: dict[str, Any], callbacks: list[L.Callback], module: Tiny | None = None, **more: Any
) -> Weights:
    module = module or Tiny()
    trainer = trainer_of(2, 6, options, callbacks=callbacks, **(VALIDATED | more))
    trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 6)))
    return weights_of(module)


@pytest.mark.few_cases(10)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_weights_set_in_a_hook_stay(way: str, hook: str) -> None:
    """A validation put back what had been before it; DiLoCo took what was set for a gradient."""
    module = Tiny(learning_rate=0.0, momentum=0.0)
    steps = {6} if hook == "on_train_epoch_end" else {4}
    got = fit(WAYS[way], [Sets(hook, steps)], module)["network.0.weight"]
    torch.testing.assert_close(got, torch.ones_like(got), rtol=0, atol=1e-12)


def test_weights_set_in_a_lambda_callback_stay() -> None:
    """Lightning's own callbacks are not watched, but that one is the user's."""

    @torch.no_grad()
    def set_weight(trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.network[0].weight.fill_(1.0)

    callbacks: list[L.Callback] = [LambdaCallback(on_train_batch_end=set_weight)]
    got = fit(DILOCO, callbacks, Tiny(learning_rate=0.0))["network.0.weight"]
    torch.testing.assert_close(got, torch.ones_like(got))


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_batch_end"])
def test_diloco_goes_on_from_what_was_set(hook: str) -> None:
    name, hand = "network.0.weight", ByHand.of(2)
    for step in range(6):
        hand.step(step)
        for other in hand.common if step % 3 == 2 else ():
            was_set = other == name and hook == "on_train_batch_end" and step == 5
            if was_set:  # since the round began: its changes are no longer all of training
                hand.common[name] = hand.mean(lambda own: own[name])
            else:
                hand.outer_step(other, hand.outer_gradient(other))
            hand.set(other, hand.common[other])
        if step == 3:
            hand.set(name, torch.ones_like(hand.common[name]))
            if hook == "on_validation_end":
                hand.common[name] = torch.ones_like(hand.common[name])
    assert_same_weights(fit(DILOCO, [Sets(hook, {4})]), hand.common)


class Validated(L.Callback):
    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step == 4:
            self.seen = pl_module.network[0].weight.detach().clone()


@pytest.mark.parametrize("way", ["average", "diloco", "diloco, streaming"])
def test_a_validation_sees_what_was_set_before_it(way: str) -> None:
    validated = Validated()
    fit(WAYS[way], [Sets("on_train_batch_end", {4}), validated])
    torch.testing.assert_close(validated.seen, torch.ones_like(validated.seen))


@pytest.mark.slow
def test_looking_at_weights_or_swapping_them_sets_nothing() -> None:
    """Nothing is compared by what was written, but by what is there."""
    plain = fit(DILOCO, [])
    for hook in HOOKS:
        for same in (lambda weight: weight, lambda weight: (weight * 2).div_(2)):
            got = fit(DILOCO, [Sets(hook, {1, 2, 4, 5}, same)])
            assert_same_weights(got, plain, rtol=0, atol=0)


def test_what_only_one_rank_sets_in_a_validation_is_refused() -> None:
    class OnFirst(Sets):
        def set(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_rank == 0:
                super().set(trainer, pl_module)

    with pytest.raises(ConfigError, match=r"different values of 'network\.0\.weight'"):
        fit(DILOCO, [OnFirst("on_validation_end", {4})])


@pytest.mark.parametrize("way", ["diloco", "average, overlapped"])
def test_a_resumed_fit_knows_what_was_set(way: str, tmp_path: Path) -> None:
    file = tmp_path / "four.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(file)

    whole = fit(WAYS[way], [Sets("on_train_batch_end", {4}), Save()], limit_val_batches=0)
    module = Tiny()
    trainer = trainer_of(2, 6, WAYS[way], callbacks=[Sets("on_train_batch_end", {9})])
    trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 6)), ckpt_path=file)
    assert_same_weights(weights_of(module), whole, rtol=0, atol=0)
