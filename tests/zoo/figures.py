"""Fifty steps of a small Llama in few bits beside one device, resumed in the middle on other ranks.

    TORCHDYNAMO_DISABLE=1 python -m tests.zoo.figures [--only AdamWFp8 ...] [--schemes zero3 ...]

A line has the greatest difference of a step's loss, the first's and the last's, as shares of it.
Compiling torchao's steps, once for each shape, would take minutes.
"""

import argparse
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_shard as ls
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.zoo import low_precision as models
from tests.zoo.test_low_precision import FOLDER, GLOBAL_BATCH, RANKS, Texts
from tests.zoo.test_optimizers import maker

NUM_STEPS = 25  # of an epoch, after each of which the ranks are others
Make = Callable[[Any], Optimizer]


def _of(name: str) -> Make:
    return lambda params: maker(name)(params, lr=1e-3)


SGD_ONLY: Make = partial(SGD, lr=0.5)
ROWS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "bitsandbytes.AdamW8bit": (models.llama, _of("bitsandbytes.AdamW8bit")),
    "torchao.AdamW8bit": (models.llama, _of("torchao.AdamW8bit")),
    "torchao.AdamWFp8": (models.llama, _of("torchao.AdamWFp8")),
    "float8": (partial(models.float8, "tensorwise"), partial(AdamW, lr=1e-3)),
    "Linear4bit": (models.four_bits, SGD_ONLY),
    "Linear8bitLt": (models.eight_bits, SGD_ONLY),
    "Int8WeightOnlyConfig": (models.inner_tensors, SGD_ONLY),
    "load_in_4bit": (partial(models.from_pretrained, FOLDER, checkpointing=False), SGD_ONLY),
}
SCHEMES: dict[str, Any] = {
    "shard_ddp": ls.DDPStrategy,
    "zero2": ls.ZeRO2Strategy,
    "zero3": ls.ZeRO3Strategy,
    "pipeline": partial(ls.PipelineParallelStrategy, num_microbatches=2),
    "tensor_parallel": ls.TensorParallelStrategy,
}


class LongTexts(Texts):
    """Takes `NUM_STEPS` steps an epoch by an optimizer of one's own."""

    def __init__(self, network: nn.Module, make: Make) -> None:
        super().__init__(network, 0.5)
        self.make = make

    def configure_optimizers(self) -> Optimizer:
        return self.make([one for one in self.parameters() if one.requires_grad])

    def train_dataloader(self) -> Any:
        stream, shape = torch.Generator().manual_seed(3), (GLOBAL_BATCH * NUM_STEPS, models.CONTEXT)
        data = TensorDataset(torch.randint(models.VOCABULARY, shape, generator=stream))
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data, **place, shuffle=False)
        return DataLoader(data, batch_size=GLOBAL_BATCH // place["num_replicas"], sampler=sampler)


def losses(row: str, strategy: Any, epochs: int, save: str, resume: Path | None) -> list[float]:
    """Train until so many epochs are over."""
    make, optimizer = ROWS[row]
    torch.manual_seed(11)
    module = LongTexts(make(), optimizer)
    trainer = quiet_trainer(
        strategy,
        max_epochs=epochs,
        max_steps=-1,
        callbacks=[ModelCheckpoint(save, "last", every_n_epochs=1)],
        enable_checkpointing=True,
    )
    trainer.fit(module, ckpt_path=resume, weights_only=False)
    return module.losses


def main() -> None:
    """Print a line for each model, scheme and change of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=[*SCHEMES])
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for row in given.only:
        with TemporaryDirectory() as folder:  # Lightning's own strategies pack 4 bits anew
            alone = ls.DDPStrategy(num_ranks=1, **RANKS) if row == "load_in_4bit" else "auto"
            expected = torch.tensor(losses(row, alone, 2, folder, None))
        for name in given.schemes:
            for ranks in ((2, 4), (4, 2)):
                before, after = (SCHEMES[name](num_ranks=one, **RANKS) for one in ranks)
                with TemporaryDirectory() as folder:
                    got = losses(row, before, 1, folder, None)
                    got += losses(row, after, 2, folder, Path(folder) / "last.ckpt")
                apart = (torch.tensor(got) / expected - 1).abs()
                figures = f"{apart.max():.1e}, {apart[0]:.1e}, {apart[-1]:.1e}"
                print(f"{row}, {name}, {ranks[0]} to {ranks[1]} ranks: {figures}", flush=True)


if __name__ == "__main__":
    main()
