"""A fit that waits in its middle until a file says that it was attacked, then goes on.

    python -m tests.security.program FOLDER STRATEGY

Each rank writes its weights' sum, and what was said when it has met anew, into FOLDER.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers import cpu_trainer

STEPS, STEP_OF_ATTACK = 8, 4
_PATIENCE_SECONDS = 200


class Model(pl.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class WaitForAttack(pl.Callback):
    """Tells that this rank is there, and waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != STEP_OF_ATTACK:
            return
        name = f"{trainer.global_rank}"
        (self._folder / name).write_text(str(os.getpid()))
        (self._folder / name).rename(
            self._folder / f"waits-{name}"
        )  # is read as soon as it is seen
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (self._folder / "attacked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        group = dist.new_group()  # a meeting at the store after the attack
        told = trainer.strategy.broadcast({"path": Path("a user's object")})
        numbers = torch.ones(4)
        dist.all_reduce(numbers, group=group)
        (self._folder / f"met-{trainer.global_rank}").write_text(f"{told} {int(numbers.sum())}")


def fit(strategy: str, folder: Path | None = None) -> float:
    """Train two ranks; return the sum of the weights."""
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(64, 8))
    trainer = cpu_trainer(
        strategy=strategy,
        devices=2,
        max_steps=STEPS,
        callbacks=[] if folder is None else [WaitForAttack(folder)],
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=4))
    full = trainer.strategy.lightning_module_state_dict()
    return float(sum(one.double().sum() for one in full.values()))


def fit_and_tell(folder: Path, strategy: str) -> None:
    """Train, and write the sum of the weights as this rank has it."""
    total = fit(strategy, folder)
    with (folder / "totals").open("a") as file:
        file.write(f"{total!r}\n")


warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)


if __name__ == "__main__":
    import lightning_shard  # noqa: F401  (registers the strategies)

    fit_and_tell(Path(sys.argv[1]), sys.argv[2])
