"""The raw loop of the example trains as the Trainer does on the same GPT."""

import argparse
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric

from examples import fabric_gpt
from examples.train_gpt import GPT, Text
from tests.examples.commands import ignoring_advice
from tests.processes import run_processes
from tests.trainers import cpu_trainer

pytestmark = ignoring_advice()
STEPS = 20


class Losses(L.Callback):
    """Notes the losses, averaged over ranks."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.noted.append(pl_module.all_gather(outputs["loss"].detach()).mean().item())


def trainers(strategy: str, steps: int = STEPS, path: Path | None = None) -> list[float]:
    L.seed_everything(0, verbose=False)
    losses = Losses()
    trainer = cpu_trainer(
        strategy=strategy,
        devices=2,
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=losses,
    )
    trainer.fit(GPT(), datamodule=Text(), ckpt_path=path, weights_only=False)
    return losses.noted


def by_hand(strategy: str, steps: int = STEPS, save: Path | None = None) -> list[float]:
    options = argparse.Namespace(steps=steps, save=save)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    return fabric.launch(fabric_gpt.train, options)


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything sets it; have it restored


@pytest.mark.slow
@pytest.mark.usefixtures("seed")
def test_a_few_losses_are_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_gpt, "validate", lambda *_: 0.0)
    expected = trainers("zero3_in_process", 2)
    torch.testing.assert_close(by_hand("zero3_in_process", 2), expected, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_the_losses_are_the_trainers(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_gpt, "validate", lambda *_: 0.0)
    expected = trainers(f"{strategy}_in_process")
    torch.testing.assert_close(by_hand(f"{strategy}_in_process"), expected, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("seed")
def test_a_trainer_goes_on_from_the_saved_loop(tmp_path: Path) -> None:
    first = by_hand("zero3_in_process", 10, save=tmp_path / "saved.ckpt")
    rest = trainers("zero2_in_process", path=tmp_path / "saved.ckpt")
    torch.testing.assert_close([*first, *rest], trainers("zero3_in_process"), rtol=1e-5, atol=0)


def of_processes() -> list[float]:
    """Train by hand over Gloo; for `run_processes`."""
    import warnings

    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")
    return by_hand("zero3")


@pytest.mark.slow
@pytest.mark.usefixtures("seed")
def test_the_losses_are_the_same_on_processes() -> None:
    for losses in run_processes(of_processes, 2):
        torch.testing.assert_close(losses, trainers("zero3_in_process"), rtol=1e-5, atol=0)
