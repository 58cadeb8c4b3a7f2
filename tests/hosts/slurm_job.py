"""A fit that SLURM starts, one rank on each of two nodes, whose every step is noted in a file.

python -m tests.hosts.slurm_job zero3|elastic FOLDER SECONDS [last]

FOLDER/steps has a line for each step: which life of the job it was in, its number, the mean loss.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ElasticStrategy, ZeRO3Strategy
from tests.hosts.program import Model

NUM_STEPS = 40
TIMEOUT_SECONDS = 15


class Journal(Callback):
    """Notes each step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = float(trainer.strategy.reduce(outputs["loss"].detach()))
        if trainer.is_global_zero:
            life = os.environ.get("SLURM_RESTART_COUNT", "0")
            port = os.environ.get("MASTER_PORT", "-")
            with self._file.open("a") as lines:
                print(life, trainer.global_step, repr(loss), port, file=lines)


def fit(
    strategy: Any, folder: Path, seconds: float, ckpt_path: str | None, ranks: tuple[int, int]
) -> None:
    """Train on so many ranks of a host, and so many hosts."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks[0],
        num_nodes=ranks[1],
        max_steps=NUM_STEPS,
        default_root_dir=folder,
        callbacks=[Journal(folder / "steps"), ModelCheckpoint(folder / "kept")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=4)
    trainer.fit(Model(seconds), loader, ckpt_path=ckpt_path)


def _main() -> None:
    scheme, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    options: dict[str, Any] = {"backend": "gloo", "timeout": TIMEOUT_SECONDS}
    strategy: Any = ZeRO3Strategy(**options)
    if scheme == "elastic":
        strategy = ElasticStrategy(scheme="zero2", min_ranks=1, snapshot_every=2, **options)
    fit(strategy, folder, seconds, "last" if "last" in sys.argv else None, (1, 2))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)
    _main()
