"""Twenty steps of a small GPT under every scheme, on ranks that some launcher has started.

python -m tests.hosts.schemes gloo 2 2 FOLDER zero1 zero2     two hosts of two ranks each

The fits come one after the other in the same processes, each with a Trainer of its own. Each rank
writes the mean loss of each step, and its host's name, into a file of its own.
"""

import json
import socket
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

import lightning_shard
from examples.train_gpt import GPT, Text
from tests.trainers import cpu_trainer

NUM_STEPS = 20
NUM_RANKS = 4
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "shard_ddp": ("DDPStrategy", {}),
    "zero1": ("ZeRO1Strategy", {}),
    "zero2": ("ZeRO2Strategy", {}),
    "zero3": ("ZeRO3Strategy", {}),
    "tensor_parallel": ("TensorParallelStrategy", {"tensor_parallel_size": 2}),
    "pipeline_parallel": ("PipelineParallelStrategy", {}),
    "hybrid_parallel": (
        "HybridParallelStrategy",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "hybrid sharding": ("HybridParallelStrategy", {"data_parallel_size": (2, 2), "zero_stage": 3}),
    "local_sgd": ("LocalSGDStrategy", {"sync_every": 5}),
    "async_sgd": ("AsyncSGDStrategy", {"staleness_bound": 0}),
    "elastic": ("ElasticStrategy", {"scheme": "zero2", "snapshot_every": 5}),
}


class Curve(Callback):
    """Keeps the mean of the ranks' losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach())))


def losses_of(scheme: str, options: dict[str, Any], devices: int, num_nodes: int) -> list[float]:
    """Train under a scheme; return each step's loss."""
    kind, own = SCHEMES[scheme]
    pl.seed_everything(0, verbose=False)
    curve = Curve()
    trainer = cpu_trainer(
        strategy=getattr(lightning_shard, kind)(**own, **options),
        devices=devices,
        num_nodes=num_nodes,
        max_steps=NUM_STEPS,
        limit_val_batches=0,
        callbacks=[curve],
    )
    # Four blocks, so that each rank of a pipeline has one.
    trainer.fit(GPT(num_layers=4, width=32), datamodule=Text(batch_size=8))
    return curve.losses


@cache
def in_process(scheme: str) -> list[float]:
    """Train under a scheme on ranks of this process."""
    return losses_of(scheme, {"backend": "in_process"}, NUM_RANKS, 1)


def main(backend: str, devices: int, num_nodes: int, folder: Path, schemes: Sequence[str]) -> None:
    """Train under some schemes on ranks of several hosts."""
    torch.set_num_threads(1)
    found = {}
    for scheme in schemes:
        found[scheme] = losses_of(scheme, {"backend": backend, "timeout": 60}, devices, num_nodes)
        print("trained", scheme, flush=True)
    told = json.dumps({"host": socket.gethostname(), "losses": found})
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(told)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec|DistributedSampler)")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
