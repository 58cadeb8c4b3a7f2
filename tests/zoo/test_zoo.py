"""Three steps of each model under each strategy: losses and weights of one device, or an error."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard import HybridParallelStrategy
from lightning_shard.errors import ShardError
from tests.features.columns import COLUMNS, ONE_DEVICE, PIPELINES, Column, Here
from tests.features.declared import Comparison
from tests.features.network import Report, weights
from tests.zoo.models import SUBJECTS
from tests.zoo.subjects import NUM_STEPS, Subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zoo,
    pytest.mark.timeout(600),  # the first import of these packages takes long
    pytest.mark.filterwarnings("ignore"),  # those of the packages
]

# Beside the features' columns one whose stages have split layers.
STRATEGIES = COLUMNS | {
    "hybrid_parallel of split layers": Column(
        name="hybrid_parallel of split layers",
        make=HybridParallelStrategy,
        options=(
            ("pipeline_parallel_size", 2),
            ("tensor_parallel_size", 2),
            ("num_microbatches", 2),
        ),
        num_ranks=4,
        num_batches=1,
    )
}
STAGED = (*PIPELINES, "hybrid_parallel of split layers")
# What the error says, by model and strategy; the others are equal.
REFUSED: dict[str, dict[str, str]] = {
    "tft": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "nbeats": dict.fromkeys(STAGED, "another stage")
    | {
        "tensor_parallel": "found nothing in NBeats to split",
        "hybrid_parallel of split layers": "found nothing in NBeats to split",
    },
    "byol": dict.fromkeys(STAGED, "no list of repeated blocks|sync_batchnorm")
    | {
        "tensor_parallel": "found nothing in BYOL to split",
        "local_sgd": "sync_batchnorm=True makes ranks wait",
    },
    "lora": {},
    "clip": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "deepseek": {},
    "vit": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "albert": dict.fromkeys(STAGED, "no list of repeated blocks"),  # one block, called again
    "t5": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "bart": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "whisper": dict.fromkeys(STAGED, "several lists of repeated blocks"),
    "convnext": dict.fromkeys(
        ("tensor_parallel", "hybrid_parallel of split layers"), "found nothing in Classes to split"
    ),
    "resnet": dict.fromkeys(STAGED, "sync_batchnorm=True asks for statistics")
    | {
        "tensor_parallel": "found nothing in Classes to split",
        "local_sgd": "sync_batchnorm=True makes ranks wait",
    },
}
# Of a mean over the ranks' statistics rounding is another than of all samples at once.
ROUNDING = {"resnet": 1e-4}


class Losses(Callback):
    """Records each step's loss, averaged over the ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs["loss"].detach().clone()
        self.values.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


class Batches(L.LightningDataModule):
    """The samples of a subject in their order, assigned to the ranks."""

    def __init__(self, subject: Subject, here: Here) -> None:
        super().__init__()
        self.subject, self.here = subject, here

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(
            self.subject.data,
            batch_size=self.here.column.batch_size,
            sampler=DistributedSampler(self.subject.data, **place, shuffle=False),
            collate_fn=self.subject.collate,
        )


def train(name: str, here: Here) -> Report:
    """Train for three steps and return the losses and the full state."""
    torch.manual_seed(11)
    subject = SUBJECTS[name]()
    losses = Losses()
    trainer = here.trainer(max_epochs=1, callbacks=[losses], **subject.flags)
    trainer.fit(subject.module, datamodule=Batches(subject, here))
    assert len(losses.values) == NUM_STEPS
    return {"losses": losses.values, "weights": weights(subject.module)}


@cache
def on_one_device(name: str) -> Report:
    with TemporaryDirectory() as folder:
        return train(name, Here(ONE_DEVICE, Path(folder)))


@pytest.mark.parametrize("column", STRATEGIES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_three_steps(name: str, column: str, tmp_path: Path) -> None:
    here = Here(STRATEGIES[column], tmp_path)
    refused = REFUSED.get(name, {}).get(column)
    if refused is not None:
        with pytest.raises(ShardError, match=refused):
            train(name, here)
        return
    comparison = Comparison(rtol=ROUNDING.get(name, 1e-5), own=False)
    comparison.check(train(name, here), on_one_device(name))
