"""What a rank of `zero3` holds of the recipe's Llama where each of its layers is a unit.

    TORCHDYNAMO_DISABLE=1 python -m tests.zoo.peaks

A line has the bytes that lie on a rank between steps, the most within one, and the formula's.
"""

import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import nn

import lightning_shard as ls
from lightning_shard.data_parallel.held_bytes import held
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.zoo import low_precision as models
from tests.zoo.figures import LongTexts
from tests.zoo.test_low_precision import FOLDER, RANKS
from tests.zoo.test_optimizers import maker

LAYER, NUM_FULL = "LlamaDecoderLayer", 2  # the one that computes, and the next


@dataclass
class Peak(L.Callback):
    """The bytes that rank 0 holds."""

    between: int = 0
    most: int = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for module in pl_module.modules():
            if type(module).__name__ == "LlamaMLP":

                def noted(*_: Any) -> None:
                    self.most = max(self.most, self._now(trainer))

                module.register_forward_hook(noted)
                module.register_full_backward_hook(noted)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.between = self._now(trainer)

    def _now(self, trainer: L.Trainer) -> int:
        return held(trainer.strategy.engine, trainer.optimizers).total


def formula(network: nn.Module, num_ranks: int) -> int:
    """Return the most bytes: all shards, the root, two layers, and one's gradients, full.

    Of an adapter there are shards of values, gradients and states of two values.
    """
    full, trained = Counter[str](), Counter[str]()
    for name, param in network.named_parameters():
        layer = name.partition(".layers.")[2].partition(".")[0]
        full[layer] += param.nbytes
        trained[layer] += param.nbytes * param.requires_grad
    shards = (full.total() + 3 * trained.total()) // num_ranks
    root = full.pop("")
    return shards + root + NUM_FULL * max(full.values()) + max(trained.values())


def peak(num_ranks: int, **options: Any) -> tuple[Peak, int]:
    """Train the recipe for two steps on so many ranks, and return the formula's peak, too."""
    torch.manual_seed(11)
    network, found = models.from_pretrained(FOLDER, checkpointing=False), Peak()
    expected = formula(network, num_ranks)
    strategy = ls.ZeRO3Strategy(
        num_ranks=num_ranks, units=[LAYER], bucket_mb=0.05, **RANKS, **options
    )
    module = LongTexts(network, lambda params: maker("bitsandbytes.AdamW8bit")(params, lr=1e-3))
    quiet_trainer(strategy, max_steps=2, callbacks=[found]).fit(module)
    return found, expected


def main() -> None:
    """Print a line for each number of ranks."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for num_ranks in (1, 2, 4):
        found, expected = peak(num_ranks)
        print(f"{num_ranks}: between {found.between}, peak {found.most}, formula {expected}")


if __name__ == "__main__":
    main()
