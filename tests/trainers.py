"""Trainers that print, log and save nothing by themselves, and the data of their ranks."""

from typing import Any

import lightning as L  # noqa: N812
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SILENT: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def cpu_trainer(**options: Any) -> L.Trainer:
    """Return a silent Trainer on CPU devices, with these options."""
    return L.Trainer(**({"accelerator": "cpu"} | SILENT | options))


def rank_loader(trainer: L.Trainer | None, dataset: Dataset[Any], global_batch: int) -> DataLoader:
    """Return this rank's part of global batches, in their order, which a Trainer would shuffle."""
    assert trainer is not None
    place = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    sampler = DistributedSampler(dataset, **place, shuffle=False)
    size = global_batch // place["num_replicas"]
    return DataLoader(dataset, batch_size=size, sampler=sampler)
