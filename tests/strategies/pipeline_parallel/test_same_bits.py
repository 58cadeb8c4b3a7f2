"""Pipelines with `same_bits=True` have the bits of one rank that takes their microbatches."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigError, HybridParallelStrategy, PipelineParallelStrategy
from lightning_shard.pipeline_parallel.schedules import SCHEDULES
from tests.patience import patient
from tests.strategies import test_same_bits as of_ranks
from tests.strategies.models import PIPELINE_MODELS
from tests.strategies.parity import SMALL_BUCKET_MB, ignoring
from tests.strategies.test_same_bits import (
    BATCH,
    CLIP,
    MICRO_BATCHES,
    NUM_STEPS,
    Centred,
    Drawn,
    Images,
    checksum,
)
from tests.trainers import SILENT

pytestmark = ignoring(".*sync_dist=True.*", ".*smaller than the logging", "The dirpath has changed")


class Staged(Images):
    """The same images, in blocks that can be shared out among stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(self._convolution(number) for number in (3, 6, 6)),
            nn.Sequential(nn.Flatten(), nn.Linear(96, 33), nn.Dropout(0.5), nn.Linear(33, 5)),
        )

    @staticmethod
    def _convolution(num_channels: int) -> nn.Module:
        layer = nn.Conv2d(num_channels, 6, 3, padding=1)
        return nn.Sequential(layer, nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2))


class CentredStaged(Centred, Staged):
    """Takes a running mean of its own off its images."""


class TiedStaged(Staged):
    """Three stages of four have one layer, the last of them twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Conv2d(6, 6, 3, padding=1)
        self.layers[1][0] = self.layers[2][0] = shared
        self.layers[0].append(shared)
        self.layers[2].append(shared)


class DrawnStaged(Staged):
    """Trains on images that are drawn when they are read."""

    data = Drawn.data


KINDS: dict[str, Callable[[], Any]] = {
    "staged": Staged,
    "centred_staged": CentredStaged,
    "drawn_staged": DrawnStaged,
    "tied_staged": TiedStaged,
    **PIPELINE_MODELS,
}
of_ranks.KINDS.update(KINDS)


@cache
def one_rank(model: str, precision: str = "32-true") -> tuple[str, str]:
    """Return the digest of what one rank saves that takes one microbatch a batch, and its logs."""
    with TemporaryDirectory() as folder:
        saved, logged, _ = of_ranks.fit(Path(folder), model=model, precision=precision)
    return saved, logged


def fit(
    folder: Path,
    *,
    model: str = "staged",
    num_stages: int = 2,
    num_copies: int = 1,
    accumulated: int = 1,
    precision: Any = "32-true",
    module: Any = None,
    size: int = MICRO_BATCHES * BATCH * 3,
    resumed: Path | None = None,
    backend: str = "in_process",
    **options: Any,
) -> tuple[str, str]:
    """Train through stages, and return the digest of what is saved, and what is logged."""
    L.seed_everything(7)
    module = KINDS[model]() if module is None else module
    in_batch = MICRO_BATCHES // (num_copies * accumulated)
    given = {"num_microbatches": in_batch} | options
    num_ranks, is_here = num_stages * num_copies, backend == "in_process"
    if is_here:
        given["num_ranks"] = num_ranks
    kind: Any = PipelineParallelStrategy
    if "zero_stage" in options:
        kind, given["pipeline_parallel_size"] = HybridParallelStrategy, num_stages
    strategy = kind(
        backend=backend, same_bits=True, bucket_mb=SMALL_BUCKET_MB, announce=False, **given
    )
    logger = CSVLogger(folder / "logs", name="", version=0)
    saved = ModelCheckpoint(
        folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = L.Trainer(
        **SILENT | {"logger": logger, "enable_checkpointing": True},
        accelerator="cpu",
        devices=1 if is_here else num_ranks,
        strategy=strategy,
        precision=precision,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
        callbacks=[saved],
    )
    data = module.data(size)
    loaders = [DataLoader(data, batch_size=BATCH * in_batch, shuffle=one) for one in (True, False)]
    validated = loaders[1] if isinstance(module, Images) else None
    trainer.fit(module, loaders[0], validated, ckpt_path=resumed)
    last = torch.load(folder / "saved" / f"step={NUM_STEPS}.ckpt", weights_only=False)
    logged = folder / "logs" / "version_0" / "metrics.csv"
    text = logged.read_text() if isinstance(module, Images) else ""
    return checksum(last["state_dict"], last["optimizer_states"]), text


def test_stages_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Schedules added gradients as they came, and each stage drew numbers of its own."""
    assert fit(tmp_path) == one_rank("staged")


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("model", ["staged", "gpt_8", "llama_8"])
def test_every_number_of_stages_has_the_same_bits(
    model: str, num_stages: int, tmp_path: Path
) -> None:
    """One rank with `num_microbatches`, too: weights, buffers, optimizer state, logged losses."""
    assert fit(tmp_path, model=model, num_stages=num_stages) == one_rank(model)


@pytest.mark.slow
def test_what_one_rank_has_begun_goes_on_through_stages(tmp_path: Path) -> None:
    """A file of the middle of an epoch, where a step was eight batches and is one."""
    _, _, last = of_ranks.fit(tmp_path / "one", model="tied_staged", num_steps=2)
    got = fit(tmp_path / "stages", model="tied_staged", resumed=last)
    assert got[0] == one_rank("tied_staged")[0]


@pytest.mark.slow
def test_data_that_is_drawn_follows_the_microbatch(tmp_path: Path) -> None:
    """A batch drew the samples of all its microbatches in one go."""
    assert fit(tmp_path, module=DrawnStaged()) == one_rank("drawn_staged")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_stages_in_processes_have_the_bits_of_one_rank(backend: str, tmp_path: Path) -> None:
    """Random numbers travel as messages do."""
    command = f"-m tests.strategies.same_bits_job {backend} pipeline_parallel 2 {tmp_path}".split()
    subprocess.run([sys.executable, *command], check=True, timeout=patient(120))
    assert (tmp_path / "digest").read_text() == "".join(one_rank("tied_staged"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_buffers_of_the_module_itself_are_those_of_the_first_microbatch(
    accumulated: int, tmp_path: Path
) -> None:
    """They were the mean of what all microbatches left."""
    got = fit(tmp_path, model="centred_staged", accumulated=accumulated)
    assert got == one_rank("centred_staged")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["staged", "tied_staged", "gpt2_8"])
def test_every_schedule_has_the_same_bits(model: str, schedule: str, tmp_path: Path) -> None:
    """Some take the newest microbatch first, some each half of a backward by itself."""
    assert fit(tmp_path, model=model, schedule=schedule) == one_rank(model)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", range(4))
def test_copies_of_pipelines_have_the_same_bits(stage: int, precision: str, tmp_path: Path) -> None:
    """A pipeline's microbatches count in the tree as those of ranks and of accumulation do."""
    given = {"num_copies": 2, "accumulated": 2, "zero_stage": stage, "precision": precision}
    assert fit(tmp_path, model="tied_staged", **given) == one_rank("tied_staged", precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", ["tied_staged", "gpt2_8"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_weights_that_stages_share_have_the_bits_of_one_rank(
    num_stages: int, model: str, precision: str, tmp_path: Path
) -> None:
    """Each stage would add up its own uses over the microbatches first; they were refused."""
    got = fit(tmp_path, model=model, num_stages=num_stages, precision=precision)
    assert got == one_rank(model, precision)


class Hooked(Staged):
    """Has a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0][0].weight.register_hook(lambda grad: grad.clamp(-1, 1))


class UsedTwice(Staged):
    """A block uses twice what a later one uses, too."""

    def __init__(self) -> None:
        super().__init__()
        shared = self.layers[2][0]
        self.layers[1] = nn.Sequential(shared, self.layers[1], shared)


class Penalised(Staged):
    """The last stage uses weights of the first."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.layers[0][0].weight.square().sum()


class OfSome(Staged):
    """One microbatch has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if 0 in batch[1][:1] else super().training_step(batch, batch_idx)


def refused(folder: Path, match: str, **options: Any) -> None:
    """Expect a fit to be refused."""
    with pytest.raises(ConfigError, match=match):
        fit(folder, **options)


def test_pipelines_whose_bits_would_depend_on_the_ranks_are_refused(tmp_path: Path) -> None:
    """Each before its first update."""
    refused(tmp_path, "Set num_microbatches", num_microbatches=None)
    refused(tmp_path, "no parts of the sum", num_microbatches=3, accumulated=2, size=96)
    refused(tmp_path, "a batch has 16 samples in 3 microbatches", num_microbatches=3)
    refused(tmp_path, "a hook on its gradient", module=Hooked())
    refused(tmp_path, "uses a parameter several times", module=UsedTwice(), num_stages=4)
    refused(tmp_path, "outside of their stage", module=Penalised())
    refused(tmp_path, "a microbatch has no loss", module=OfSome())
