"""A checkpoint is the same file whatever wrote it, and any scheme on any size resumes from it."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.scheme_files import (
    FILTERS,
    Save,
    assert_goes_on,
    assert_same,
    batches,
    build_double,
    load,
    saving,
    trainer_of,
)
from tests.processes import run_alone
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import STRATEGIES, quiet_trainer

pytestmark = FILTERS


@dataclass(frozen=True)
class Scheme:
    """A strategy on so many in-process ranks; one rank of no strategy is plain Lightning."""

    strategy: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}x{self.num_ranks}"

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        strategy = self.strategy if self.strategy == "auto" else f"{self.strategy}_in_process"
        return trainer_of(strategy, self.num_ranks, **options)


PLAIN = Scheme("auto", 1)
SCHEMES = [Scheme(strategy, num_ranks) for strategy, num_ranks in product(STRATEGIES, (2, 4))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    return saving(tmp_path_factory)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("model", ["mixture", "lstm"])
def test_the_file_is_that_of_a_single_device(model: str, scheme: Scheme, saved: Save) -> None:
    got, expected = saved(model, scheme), saved(model, PLAIN)
    assert_same(load(got.first_epoch), load(expected.first_epoch))
    assert_same(load(got.last_epoch), load(expected.last_epoch))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_save_checkpoint_after_fit(scheme: Scheme, saved: Save) -> None:
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


def _check_resume(before: Scheme, after: Scheme, saved: Save) -> None:
    file = saved("mixture", before).first_epoch
    assert_goes_on(build_double("mixture"), "mixture", file, after, saved("mixture", PLAIN))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("before", "after"), QUICK_RESUMES, ids=str)
def test_resume(before: Scheme, after: Scheme, saved: Save) -> None:
    _check_resume(before, after, saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in RESUMES if pair not in QUICK_RESUMES], ids=str
)
def test_resume_everywhere(before: Scheme, after: Scheme, saved: Save) -> None:
    _check_resume(before, after, saved)


LOAD_WITHOUT_US = """
import sys
from examples.train_gpt import GPT
model = GPT.load_from_checkpoint(sys.argv[1], weights_only=True)
assert not [name for name in sys.modules if name.startswith("lightning_shard")]
print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.mark.slow
def test_load_from_checkpoint_without_this_package(tmp_path: Path) -> None:
    model = ExampleGPT()
    trainer = quiet_trainer(strategy="zero3_in_process", devices=4, max_steps=2)
    trainer.fit(model, datamodule=batches(model))
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    finished = run_alone("-c", LOAD_WITHOUT_US, str(tmp_path / "gpt.ckpt"))
    assert finished.returncode == 0, finished.output
    expected = sum(param.double().sum().item() for param in model.parameters())
    assert float.fromhex(finished.output.strip().splitlines()[-1]) == expected


@pytest.mark.parametrize("scheme", [Scheme("shard_ddp", 2), Scheme("zero3", 4)], ids=str)
def test_weights_only(scheme: Scheme, tmp_path: Path) -> None:
    model = build_double("lstm")
    writer = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    trainer = scheme.trainer("lstm", callbacks=[writer], enable_checkpointing=True, max_steps=2)
    trainer.fit(model, datamodule=batches(model))
    checkpoint = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    assert_same(dict(checkpoint["state_dict"]), dict(model.state_dict()))
