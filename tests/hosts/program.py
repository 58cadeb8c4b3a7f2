"""A fit of one rank on each of two hosts, or of as many as torchrun or NUM_NODES says.

python -m tests.hosts.program zero3|elastic STEPS SECONDS
"""

import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ElasticStrategy, ZeRO3Strategy
from tests.trainers import cpu_trainer

TIMEOUT_SECONDS = 15


class Model(pl.LightningModule):
    """A linear layer, whose steps take a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._seconds = seconds

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        if self._seconds:
            print("step", index, flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, num_steps: int, seconds: float, devices: int, num_nodes: int) -> float:
    """Train; return the sum of the weights."""
    pl.seed_everything(1, verbose=False)
    trainer = cpu_trainer(
        strategy=strategy, devices=devices, num_nodes=num_nodes, max_steps=num_steps
    )
    model = Model(seconds)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=4))
    weights = trainer.strategy.lightning_module_state_dict()
    return float(sum(one.double().sum() for one in weights.values()))


def _main() -> None:
    scheme, num_steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    strategy: Any = ZeRO3Strategy(backend="gloo", timeout=timeout)
    if scheme == "elastic":
        strategy = ElasticStrategy(
            scheme="zero2", backend="gloo", min_ranks=1, snapshot_every=2, timeout=timeout
        )
    num_nodes = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("NUM_NODES", "2"))
    print("total", repr(fit(strategy, num_steps, seconds, 1, int(num_nodes))), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)
    _main()
