"""Find a symbol in a text of noise: a long context, of which each rank has a part.

    python -m examples.recipes.long_context
    python -m examples.recipes.long_context --backend auto --accelerator gpu --devices 8

One of sixteen symbols stands here and there in the first half of each text, and is asked for at its
end. The last rank's part of the text does not tell: attention has to reach what others have. The
model is the GPT of `train_gpt.py`, as it is.
"""

import argparse
import warnings
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.train_gpt import GPT
from lightning_shard import ContextParallelStrategy

NUM_SYMBOLS, QUESTION = 16, 255
NOTHING = -100  # cross_entropy asks for nothing there


class Hidden(L.LightningDataModule):
    """Texts of noise, in each of which one symbol is hidden in many places.

    Args:
        context: Bytes of a text.
        number: How many texts there are to train on.
    """

    def __init__(self, context: int, number: int) -> None:
        super().__init__()
        self.context, self.number = context, number

    def texts(self, number: int, seed: int) -> DataLoader:
        """Draw texts, and what follows: nothing but the symbol after the last byte."""
        random = torch.Generator().manual_seed(seed)
        text = torch.randint(NUM_SYMBOLS, QUESTION, (number, self.context), generator=random)
        symbols = torch.randint(NUM_SYMBOLS, (number,), generator=random)
        places = torch.rand(number, self.context // 2, generator=random).argsort()
        text.scatter_(1, places[:, : self.context // 8], symbols[:, None].expand_as(places))
        text[:, -1] = QUESTION
        following = torch.full_like(text, NOTHING)
        following[:, -1] = symbols
        return DataLoader(TensorDataset(text, following), batch_size=8)

    def train_dataloader(self) -> DataLoader:
        """Iterate over the texts, all of which are new."""
        return self.texts(self.number, seed=0)

    def val_dataloader(self) -> DataLoader:
        """Iterate over texts that nothing was trained on."""
        return self.texts(64, seed=1)


class Finder(GPT):
    """The GPT, which also logs how many symbols it finds."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss and the share of symbols that are found."""
        super().validation_step(batch, batch_idx)
        text, following = batch
        found = self(text)[:, -1].argmax(-1) == following[:, -1]
        self.log("found", found.float().mean(), sync_dist=True)


def train(strategy: Any, context: int = 512, steps: int = 80, **options: Any) -> L.Trainer:
    """Train for so many steps, and validate."""
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Finder(context=context, num_layers=2, width=64)
    trainer.fit(model, datamodule=Hidden(context, 8 * steps))
    return trainer


def main() -> None:
    """Train, and say what was found."""
    parser = argparse.ArgumentParser(description="Train a GPT on long texts.")
    parser.add_argument("--context", type=int, default=512, help="bytes of a text")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--backend", default="in_process", help="auto: each rank is a process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    options = vars(parser.parse_args())
    trainer = train(ContextParallelStrategy(backend=options.pop("backend")), **options)
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"loss {metrics['val_loss']:.2f}, {metrics['found']:.0%} of the symbols found")


if __name__ == "__main__":
    main()
