"""Files that runs of a model leave under any scheme, to be compared with a single device's.

two epochs ──> step=3.ckpt, step=6.ckpt     by ModelCheckpoint
└─> afterwards.ckpt              by save_checkpoint after the fit
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.errors import CheckpointError, ConfigError
from tests.strategies.models import Trained
from tests.strategies.parity import (
    ACCUMULATE,
    UPSTREAM_WARNINGS,
    Curve,
    GlobalBatches,
    build,
    quiet_trainer,
)

EPOCH_STEPS = 3
RTOL, ATOL = 1e-9, 1e-14  # in float64
FILTERS = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    # The resumed runs write no checkpoints of their own.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class SchemeOf(Protocol):
    """A strategy on so many ranks."""

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        """Return a Trainer of two epochs in float64, for the model of this name."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a run leaves."""

    first_epoch: Path
    last_epoch: Path
    afterwards: Path
    curve: Curve
    model: Trained


Save = Callable[[str, Any], Saved]


def trainer_of(strategy: Any, num_ranks: int, **options: Any) -> L.Trainer:
    """Return a Trainer of two epochs in float64."""
    defaults = {"max_steps": 2 * EPOCH_STEPS, "precision": "64-true"}
    return quiet_trainer(strategy=strategy, devices=num_ranks, **(defaults | options))


def build_double(name: str) -> Trained:
    """Return a model in float64: Lightning restores weights before it converts the module."""
    return build(name).double()


def batches(model: Trained) -> GlobalBatches:
    """Return the data of an epoch."""
    return GlobalBatches(model, EPOCH_STEPS)


def saving(
    tmp_path_factory: pytest.TempPathFactory, make: Callable[[str], Trained] = build_double
) -> Save:
    """Return a function that trains a model under a scheme, once, and gives its files."""

    @cache
    def run(model_name: str, scheme: SchemeOf) -> Saved:
        folder = tmp_path_factory.mktemp(f"{model_name}_{scheme}")
        model, curve = make(model_name), Curve()
        # Lightning 2.6 repeats a batch when it resumes from a file of on_train_epoch_end.
        writer = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=EPOCH_STEPS)
        trainer = scheme.trainer(model_name, callbacks=[curve, writer], enable_checkpointing=True)
        trainer.fit(model, datamodule=batches(model))
        trainer.save_checkpoint(folder / "afterwards.ckpt")
        return Saved(
            first_epoch=folder / f"step={EPOCH_STEPS}.ckpt",
            last_epoch=folder / f"step={2 * EPOCH_STEPS}.ckpt",
            afterwards=folder / "afterwards.ckpt",
            curve=curve,
            model=model,
        )

    return run


def load(path: Path) -> dict[str, Any]:
    """Return a file's content, but for what no two schemes have in common."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    del checkpoint["callbacks"]  # ModelCheckpoint's folder
    checkpoint.pop(CHECKPOINT_KEY, None)  # which a single device has not
    return checkpoint


def assert_same_files(got: Saved, expected: Saved) -> None:
    """Compare all files of two runs."""
    assert_same(load(got.first_epoch), load(expected.first_epoch))
    assert_same(load(got.last_epoch), load(expected.last_epoch))
    assert_same(load(got.afterwards), load(expected.afterwards))


def assert_goes_on(model: Trained, name: str, file: Path, after: SchemeOf, full: Saved) -> None:
    """Let `model` go on from the file of a first epoch, and compare with a run without a break."""
    curve = Curve()
    after.trainer(name, callbacks=[curve]).fit(model, datamodule=batches(model), ckpt_path=file)
    assert_same(curve.losses, full.curve.losses[-EPOCH_STEPS * ACCUMULATE :])
    assert_same(curve.norms, full.curve.norms[-EPOCH_STEPS:])
    assert_same(dict(model.state_dict()), dict(load(full.last_epoch)["state_dict"]))


def assert_same(got: Any, expected: Any, place: str = "checkpoint") -> None:
    """Compare nested containers: types, keys, and values up to rounding."""
    assert type(got) is type(expected), f"{place}: {type(got)} instead of {type(expected)}"
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), place
        assert getattr(got, "_metadata", None) == getattr(expected, "_metadata", None), place
        for key in expected:
            assert_same(got[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), place
        for index, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{place}.{index}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            got, expected, rtol=RTOL, atol=ATOL, msg=lambda found: f"{place}: {found}"
        )
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=RTOL, abs=0.0), place
    else:
        assert got == expected, place


class Failing(L.Callback):
    """Stops rank 1 in its second step: where all ranks fail at one place the model is full."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.strategy.mesh_rank == 1:
            raise RuntimeError("the disk is full")


def assert_shards_are_left(name: str, scheme: SchemeOf, other: SchemeOf, file: Path) -> None:
    """Let a fit fail, and find its model as it was, but neither saved nor trained on."""
    model = build_double(name)
    classes = [type(module) for module in model.modules()]
    trainer = scheme.trainer(name, callbacks=[Failing()])
    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer.fit(model, datamodule=batches(model))
    assert [type(module) for module in model.modules()] == classes
    with pytest.raises(CheckpointError, match="left shards of its state on the ranks"):
        trainer.save_checkpoint(file)
    for again in (scheme, other):
        with pytest.raises(ConfigError, match="only one rank's shard"):
            again.trainer(name).fit(model, datamodule=batches(model))
