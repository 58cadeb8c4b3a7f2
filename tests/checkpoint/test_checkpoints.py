"""A checkpoint is the same file whatever wrote it, and any scheme on any size resumes from it.

Only what each rank keeps for itself, the section of this package's strategies, differs.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from tests.processes import REPOSITORY
from tests.strategies.models import ExampleGPT, Trained
from tests.strategies.parity import (
    ACCUMULATE,
    STRATEGIES,
    UPSTREAM_WARNINGS,
    Curve,
    GlobalBatches,
    build,
    quiet_trainer,
)

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    # The resumed runs write no checkpoints of their own.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

EPOCH_STEPS = 6
RTOL, ATOL = 1e-9, 1e-14  # in float64


@dataclass(frozen=True)
class Scheme:
    """A strategy on so many in-process ranks; one rank of no strategy is plain Lightning."""

    strategy: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}x{self.num_ranks}"

    def trainer(self, **options: Any) -> L.Trainer:
        """Return a Trainer of two epochs."""
        return quiet_trainer(
            strategy=self.strategy if self.strategy == "auto" else f"{self.strategy}_in_process",
            devices=self.num_ranks,
            precision="64-true",
            **({"max_steps": 2 * EPOCH_STEPS} | options),
        )


def build_double(name: str) -> Trained:
    """Return a model in float64: Lightning restores weights before it converts the module."""
    return build(name).double()


def batches(model: Trained) -> GlobalBatches:
    return GlobalBatches(model, EPOCH_STEPS)


PLAIN = Scheme("auto", 1)
SCHEMES = [Scheme(strategy, num_ranks) for strategy, num_ranks in product(STRATEGIES, (2, 4))]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The files of a run: what ModelCheckpoint wrote, and `save_checkpoint` after the fit."""

    first_epoch: Path
    last_epoch: Path
    afterwards: Path
    curve: Curve


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains a model under a scheme, once, and gives its files."""

    @cache
    def run(model_name: str, scheme: Scheme) -> Saved:
        folder = tmp_path_factory.mktemp(f"{model_name}_{scheme}")
        model, curve = build_double(model_name), Curve()
        # Lightning 2.6 repeats a batch when it resumes from a file of on_train_epoch_end.
        writer = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=EPOCH_STEPS)
        trainer = scheme.trainer(callbacks=[curve, writer], enable_checkpointing=True)
        trainer.fit(model, datamodule=batches(model))
        trainer.save_checkpoint(folder / "afterwards.ckpt")
        return Saved(
            first_epoch=folder / f"step={EPOCH_STEPS}.ckpt",
            last_epoch=folder / f"step={2 * EPOCH_STEPS}.ckpt",
            afterwards=folder / "afterwards.ckpt",
            curve=curve,
        )

    return run


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


def load(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    del checkpoint["callbacks"]  # ModelCheckpoint's folder
    checkpoint.pop(CHECKPOINT_KEY, None)  # which a single device has not
    return checkpoint


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("model", ["mixture", "lstm"])
def test_the_file_is_that_of_a_single_device(model: str, scheme: Scheme, saved: Any) -> None:
    got, expected = saved(model, scheme), saved(model, PLAIN)
    assert_same(load(got.first_epoch), load(expected.first_epoch))
    assert_same(load(got.last_epoch), load(expected.last_epoch))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_save_checkpoint_after_fit(scheme: Scheme, saved: Any) -> None:
    got, expected = saved("lstm", scheme), saved("lstm", PLAIN)
    assert_same(load(got.afterwards), load(expected.afterwards))
    assert_same(load(got.afterwards)["optimizer_states"], load(got.last_epoch)["optimizer_states"])


RESUMES = [(before, after) for before in (PLAIN, *SCHEMES) for after in (PLAIN, *SCHEMES)]
QUICK_RESUMES = [
    (PLAIN, Scheme("zero3", 4)),
    (Scheme("zero3", 4), PLAIN),
    (Scheme("zero3", 4), Scheme("zero3", 4)),
    (Scheme("zero3", 4), Scheme("zero3", 2)),
    (Scheme("zero3", 2), Scheme("zero1", 4)),
    (Scheme("zero1", 4), Scheme("zero2", 2)),
    (Scheme("zero2", 2), Scheme("shard_ddp", 4)),
    (Scheme("shard_ddp", 4), Scheme("zero2", 4)),
]


def _check_resume(before: Scheme, after: Scheme, saved: Any) -> None:
    full, curve = saved("mixture", PLAIN), Curve()
    model = build_double("mixture")
    trainer = after.trainer(callbacks=[curve])
    trainer.fit(
        model,
        datamodule=batches(model),
        ckpt_path=saved("mixture", before).first_epoch,
    )
    assert_same(curve.losses, full.curve.losses[-EPOCH_STEPS * ACCUMULATE :])
    assert_same(curve.norms, full.curve.norms[-EPOCH_STEPS:])
    assert_same(dict(model.state_dict()), dict(load(full.last_epoch)["state_dict"]))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("before", "after"), QUICK_RESUMES, ids=str)
def test_resume(before: Scheme, after: Scheme, saved: Any) -> None:
    _check_resume(before, after, saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in RESUMES if pair not in QUICK_RESUMES], ids=str
)
def test_resume_everywhere(before: Scheme, after: Scheme, saved: Any) -> None:
    _check_resume(before, after, saved)


LOAD_WITHOUT_US = """
import sys
from examples.train_gpt import GPT
model = GPT.load_from_checkpoint(sys.argv[1], weights_only=True)
assert not [name for name in sys.modules if name.startswith("lightning_shard")]
print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


def test_load_from_checkpoint_without_this_package(tmp_path: Path) -> None:
    model = ExampleGPT()
    trainer = quiet_trainer(strategy="zero3_in_process", devices=4, max_steps=2)
    trainer.fit(model, datamodule=batches(model))
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    command = [sys.executable, "-c", LOAD_WITHOUT_US, str(tmp_path / "gpt.ckpt")]
    finished = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert finished.returncode == 0, finished.stderr
    expected = sum(param.double().sum().item() for param in model.parameters())
    assert float.fromhex(finished.stdout.strip().splitlines()[-1]) == expected


@pytest.mark.parametrize("scheme", [Scheme("shard_ddp", 2), Scheme("zero3", 4)], ids=str)
def test_weights_only(scheme: Scheme, tmp_path: Path) -> None:
    model = build_double("lstm")
    writer = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    trainer = scheme.trainer(callbacks=[writer], enable_checkpointing=True, max_steps=2)
    trainer.fit(model, datamodule=batches(model))
    checkpoint = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    assert_same(dict(checkpoint["state_dict"]), dict(model.state_dict()))
