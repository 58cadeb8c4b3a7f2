"""Asynchronous SGD begins synchronously: which steps are which, resuming, and errors."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_shard import AsyncSGDStrategy, ConfigError, ZeRO1Strategy
from tests.strategies.local_sgd.local_training import (
    BATCH,
    Tiny,
    TinyData,
    assert_same_weights,
    tiny_data,
    weights_of,
)
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(
    "Be aware that when using `ckpt_path`", "You're resuming from a checkpoint that ended before"
)
NUM_RANKS = 3


def trained(strategy: Any, num_steps: int, ckpt_path: Path | None = None, **more: Any) -> Tiny:
    module = Tiny()
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "limit_val_batches": 0} | more
    trainer = quiet_trainer(
        strategy=strategy, devices=NUM_RANKS, max_steps=num_steps, max_epochs=2, **options
    )
    data = TinyData(tiny_data(NUM_RANKS * BATCH * 8))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def asynchronous(warmup_steps: int) -> AsyncSGDStrategy:
    return AsyncSGDStrategy(backend="in_process", staleness_bound=3, warmup_steps=warmup_steps)


@pytest.mark.parametrize("warmup_steps", [6, 7])
def test_a_warm_up_is_synchronous_to_the_bit(warmup_steps: int) -> None:
    strategy = asynchronous(warmup_steps)
    module = trained(strategy, 6, gradient_clip_val=0.2)
    plain = trained(ZeRO1Strategy(backend="in_process"), 6, gradient_clip_val=0.2)
    assert_same_weights(weights_of(module), weights_of(plain), rtol=0, atol=0)
    assert strategy.counters.steps == 0


def test_after_the_warm_up_ranks_train_by_themselves() -> None:
    strategy = asynchronous(5)
    trained(strategy, 12)  # past the end of an epoch of 8
    assert strategy.counters.steps == 7
    assert strategy.counters.gradients == 7 * NUM_RANKS


class SaveAt(L.Callback):
    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize(("saved_at", "num_asynchronous"), [(3, 7), (8, 4)])
def test_a_warm_up_counts_the_steps_of_the_full_one_run(
    saved_at: int, num_asynchronous: int, tmp_path: Path
) -> None:
    """A run that is resumed within its warm-up ends it; one that is resumed later has none."""
    file = tmp_path / "saved.ckpt"
    trained(asynchronous(5), saved_at, callbacks=[SaveAt(file, saved_at)])
    strategy = asynchronous(5)
    trained(strategy, 12, ckpt_path=file)
    assert strategy.counters.steps == num_asynchronous


@pytest.mark.parametrize("warmup_steps", [-1, 2.5, None])
def test_a_warm_up_is_a_number_of_steps(warmup_steps: Any) -> None:
    with pytest.raises(ConfigError, match="warmup_steps must be a"):
        asynchronous(warmup_steps)


def test_weights_move_after_the_warm_up() -> None:
    short, long = trained(asynchronous(5), 5), trained(asynchronous(5), 9)
    for name, value in weights_of(long).items():
        assert not torch.equal(value, weights_of(short)[name])
