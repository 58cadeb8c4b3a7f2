"""Batches in the samples' order, of which the ranks have equal shares."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.features.columns import Here


class Batches(L.LightningDataModule):
    """Loaders of one data set; training sees it in its order, which the Trainer would shuffle."""

    def __init__(
        self, here: Here, data: Dataset[Any], loader: Callable[..., DataLoader] = DataLoader
    ) -> None:
        super().__init__()
        self.here, self.data, self.loader = here, data, loader

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(self.data, **place, shuffle=False)
        return self.loader(self.data, batch_size=self.here.column.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.data, batch_size=self.here.column.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def logged(trainer: Any) -> dict[str, float]:
    """Return what was logged for whole epochs; of a step each rank logs its own share."""
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if not name.endswith("_step")}
