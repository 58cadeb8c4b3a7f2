"""A script of several fits on real ranks, one of which dies in the second, or in a validation.

python -m tests.elastic.several_fits FOLDER (trainer | fit | validate)
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import ElasticStrategy
from tests.elastic.runs import Classifier, Journal, samples
from tests.trainers import cpu_trainer

DEATH = 40  # the step of the second fit in which rank 1 dies, once


class Mortal(Classifier):
    """Ends its process by SIGKILL, once in a job."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(Journal())
        self.mark, self.what = folder / "killed", what

    def die_once(self) -> None:
        if self.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.what == "fit" and self.global_step == DEATH:
            self.die_once()
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.die_once()


def trainer_of(max_epochs: int) -> L.Trainer:
    return cpu_trainer(
        strategy=ElasticStrategy(backend="gloo", snapshot_every=3, timeout=120),
        devices=2,
        max_epochs=max_epochs,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=4, shuffle=True)


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    module, trainer = Mortal(folder, what), trainer_of(2)
    trainer.fit(module, loader())
    told = [trainer.global_step]
    if what == "validate":
        trainer.validate(module, loader(), verbose=False)
    elif what == "trainer":
        trainer = trainer_of(3)
        trainer.fit(module, loader())
    else:
        trainer.fit_loop.max_epochs = 6
        trainer.fit(module, loader())
    told.append(trainer.global_step)
    (folder / f"rank{trainer.global_rank}").write_text(" ".join(map(str, told)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
