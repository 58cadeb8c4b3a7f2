"""What `same_bits=True` costs in a step: processor time beside the same strategy without it.

python -m tests.strategies.same_bits_cost [ROUNDS] [SCHEME ...]

Both train in turn in one process, two ranks each, so that what else a machine does counts for both.
"""

import sys
import time
import warnings
from statistics import median
from typing import Any

import lightning as L  # noqa: N812
from torch.utils.data import DataLoader

from lightning_shard import PipelineParallelStrategy
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import STRATEGIES
from tests.trainers import SILENT

RANKS = 2
BATCH = 32  # of 16 tokens
NUM_STEPS = 5
WARM_UP = 2  # steps that do not count


class Clock(L.Callback):
    """Takes the processor time of all ranks from one step to the last."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.process_time()
        if trainer.global_step <= WARM_UP:
            self.begin = now
        self.seconds = (now - self.begin) / (NUM_STEPS - WARM_UP)


def seconds(scheme: str, accumulated: int, *, same_bits: bool) -> float:
    """Return the processor time of a step of all ranks."""
    L.seed_everything(1, verbose=False)
    given: dict[str, Any] = {"same_bits": same_bits, "announce": False, "backend": "in_process"}
    in_batch, size = 1, BATCH
    if scheme == "pipeline_parallel":  # whose micro-batches are those of a batch
        in_batch, accumulated = RANKS * accumulated, 1
        given["num_microbatches"], size = in_batch, BATCH * in_batch
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
    data = module.data(BATCH * RANKS * 4 * NUM_STEPS)
    trainer.fit(module, DataLoader(data, batch_size=size))
    return clock.seconds


def main(rounds: int, schemes: list[str]) -> None:
    """Print the median of both and of their ratio, for each scheme, for M = N and M = 4 N."""
    warnings.simplefilter("ignore")
    for scheme in schemes:
        for accumulated in (1, 4):
            pairs = []
            for number in range(rounds):
                order = (False, True) if number % 2 else (True, False)
                taken = {one: seconds(scheme, accumulated, same_bits=one) for one in order}
                pairs.append((taken[False], taken[True]))
            ratio = median(with_it / plain for plain, with_it in pairs)
            plain, with_it = (median(one) for one in zip(*pairs, strict=True))
            print(
                f"{scheme:18} M = {'N' if accumulated == 1 else '4 N':4} "
                f"{plain * 1e3:7.1f} ms  with it {with_it * 1e3:7.1f} ms  ratio {ratio:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    given = sys.argv[2:] or [*STRATEGIES, "pipeline_parallel"]
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9, given)
