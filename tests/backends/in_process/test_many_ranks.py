"""Training on 64 ranks of one process."""

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

import lightning_shard  # noqa: F401 - registers the strategies
from tests.trainers import cpu_trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64  # one batch of all ranks, so that no order of shuffling matters

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(32.0) / 320 + index / 640


class Model(BoringModel):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), batch_size=self.batch_size)


def trained(num_ranks: int) -> dict[str, torch.Tensor]:
    model = Model(64 // num_ranks)
    trainer = cpu_trainer(
        devices=num_ranks,
        strategy="zero2_in_process" if num_ranks > 1 else "auto",
        max_epochs=2,
        limit_val_batches=0,
    )
    trainer.fit(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_zero2_on_64_ranks_trains_as_one_device_does() -> None:
    torch.testing.assert_close(trained(64), trained(1), rtol=1e-5, atol=1e-6)
