"""What the launchers start in tests: train two steps, write down who this rank is and its weights.

python -m tests.environments.program FOLDER STRATEGY DEVICES NUM_NODES
"""

import sys
from pathlib import Path
from typing import Any

import torch

import lightning_shard  # noqa: F401  (registers the strategies)
from tests.strategies.parity import GlobalBatches, build, ignore_upstream_warnings, quiet_trainer

MODEL = "gpt"
NUM_STEPS = 2


def train(**options: Any) -> dict[str, Any]:
    """Train on the same global batches on any number of ranks."""
    model = build(MODEL)
    trainer = quiet_trainer(max_steps=NUM_STEPS, **options)
    trainer.fit(model, datamodule=GlobalBatches(model, NUM_STEPS))
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return {
        "environment": type(environment).__name__,
        "place": (trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank),
        "weights": model.state_dict(),
    }


def main(folder: str, strategy: str, devices: str, num_nodes: str) -> None:
    ignore_upstream_warnings()
    result = train(strategy=strategy, devices=int(devices), num_nodes=int(num_nodes))
    torch.save(result, Path(folder, f"rank_{result['place'][0]}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
