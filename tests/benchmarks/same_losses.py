"""Two checkouts side by side: are the losses of the example GPT the same to the bit?

    python -m tests.benchmarks.same_losses BEFORE AFTER

Both are folders with the package and its examples. Each trains 20 steps under every strategy on
ranks of one process; `async_sgd` is left out, whose gradients arrive in no fixed order.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.trainers import cpu_trainer

NUM_STEPS = 20
TWO: dict[str, Any] = {"backend": "in_process", "num_ranks": 2}
FOUR: dict[str, Any] = {"backend": "in_process", "num_ranks": 4}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "shard_ddp": ("DDPStrategy", TWO),
    "zero1": ("ZeRO1Strategy", TWO),
    "zero2": ("ZeRO2Strategy", TWO),
    "zero3": ("ZeRO3Strategy", TWO),
    "tensor_parallel": ("TensorParallelStrategy", TWO),
    "pipeline_parallel": ("PipelineParallelStrategy", TWO),
    "hybrid_parallel": (
        "HybridParallelStrategy",
        FOUR | {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "hybrid sharding": (
        "HybridParallelStrategy",
        FOUR | {"data_parallel_size": (2, 2), "zero_stage": 3},
    ),
    "shard_ddp, int8": ("DDPStrategy", TWO | {"compression": "int8"}),
    "shard_ddp, powersgd": ("DDPStrategy", TWO | {"compression": "powersgd"}),
    "local_sgd": ("LocalSGDStrategy", TWO | {"sync_every": 5}),
    "elastic": ("ElasticStrategy", TWO),
}


def losses() -> dict[str, list[str]]:
    """Train with the package that is on the path; the losses are exact, in hexadecimal."""
    import torch
    from lightning.pytorch.callbacks import Callback

    import lightning_shard
    from examples.train_gpt import GPT, Text

    class Curve(Callback):
        def __init__(self) -> None:
            self.losses: list[str] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            mean = trainer.strategy.reduce(outputs["loss"].detach())
            if trainer.global_rank == 0:
                self.losses.append(float(mean).hex())

    found = {}
    for name, (kind, options) in RUNS.items():
        torch.manual_seed(0)
        model, curve = GPT(num_layers=2, width=32), Curve()
        trainer = cpu_trainer(
            strategy=getattr(lightning_shard, kind)(**options),
            max_steps=NUM_STEPS,
            num_sanity_val_steps=0,
            callbacks=[curve],
        )
        trainer.fit(model, datamodule=Text(batch_size=8))
        found[name] = curve.losses
    return found


def losses_of(checkout: Path) -> dict[str, list[str]]:
    """Train with the package of a checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).resolve()), "--print"]
    run = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print a table; the status is 1 where a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print:
        print(json.dumps(losses()))
        return 0
    before, after = (losses_of(checkout.resolve()) for checkout in arguments.checkouts)
    table = Table("strategy", "steps", "last loss before", "last loss after", "the same bits")
    for name in RUNS:
        last = [f"{float.fromhex(found[name][-1]):.6f}" for found in (before, after)]
        steps = str(len(after[name]))
        table.add_row(name, steps, *last, "yes" if before[name] == after[name] else "NO")
    Console().print(table)
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
