"""What `same_bits=True` costs in a step: processor time beside the same strategy without it.

python -m tests.strategies.same_bits_cost [ROUNDS] [SCHEME ...] [--samples 32]

A second figure is what a rank holds of gradients between two micro-batches, at the most. Both
train in turn in one process, two ranks each, so that what else a machine does counts for both.
"""

import argparse
import time
import warnings
from itertools import product
from statistics import median
from typing import Any

import lightning as L  # noqa: N812
from torch.utils.data import DataLoader

from lightning_shard import PipelineParallelStrategy
from lightning_shard.data_parallel.held_bytes import held
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import STRATEGIES
from tests.trainers import SILENT

RANKS = 2
NUM_STEPS = 5
WARM_UP = 2  # steps that do not count


class Clock(L.Callback):
    """Takes the processor time of all ranks from one step to the last, and rank 0's memory."""

    gradient_bytes = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        engine: Any = getattr(trainer.strategy, "engine")  # noqa: B009  (Lightning's type has none)
        self.gradient_bytes = max(self.gradient_bytes, held(engine, ()).gradients)
        now = time.process_time()
        if trainer.global_step <= WARM_UP:
            self.begin = now
        self.seconds = (now - self.begin) / (NUM_STEPS - WARM_UP)


def train(scheme: str, size: int, accumulated: int, *, same_bits: bool) -> Clock:
    """Train on all ranks in micro-batches of so many samples; return the clock."""
    L.seed_everything(1, verbose=False)
    given: dict[str, Any] = {"same_bits": same_bits, "announce": False, "backend": "in_process"}
    num_samples = size * RANKS * 4 * NUM_STEPS
    if scheme == "pipeline_parallel":  # whose micro-batches are those of a batch
        given["num_microbatches"] = RANKS * accumulated
        size, accumulated = size * RANKS * accumulated, 1
    kind: Any = STRATEGIES.get(scheme, PipelineParallelStrategy)
    clock = Clock()
    module = ExampleGPT(width=128, num_layers=9)
    trainer = L.Trainer(
        **SILENT,
        accelerator="cpu",
        devices=1,
        strategy=kind(num_ranks=RANKS, **given),
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=1.0,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(module.data(num_samples), batch_size=size))
    return clock


def main(rounds: int, schemes: list[str], size: int) -> None:
    """Print medians of both and of their ratio, for each scheme, for M = N and M = 4 N."""
    warnings.simplefilter("ignore")
    for scheme, accumulated in product(schemes, (1, 4)):
        pairs = []
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            taken = {one: train(scheme, size, accumulated, same_bits=one) for one in order}
            pairs.append((taken[False], taken[True]))
        ratio = median(with_it.seconds / plain.seconds for plain, with_it in pairs)
        of_both = (
            f"{median(one.seconds for one in clocks) * 1e3:7.1f} ms "
            f"{clocks[0].gradient_bytes / 2**20:5.1f} MiB"
            for clocks in zip(*pairs, strict=True)
        )
        many = "N" if accumulated == 1 else "4 N"
        print(f"{scheme:18} M = {many:4}", *of_both, f"ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    parser.add_argument("schemes", nargs="*", default=[*STRATEGIES, "pipeline_parallel"])
    parser.add_argument("--samples", type=int, default=32, help="of 16 tokens, in a micro-batch")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.schemes, arguments.samples)
