"""A script of several runs of different kinds, one after the other in the same processes.

python -m tests.elastic.kinds FOLDER zero2 elastic fabric ...     by whatever launcher
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard import fabric as of_fabric
from tests.hosts.program import Model
from tests.strategies.parity import ignore_upstream_warnings
from tests.trainers import cpu_trainer

NUM_RANKS = 2
NUM_STEPS = 4
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2": ("ZeRO2Strategy", {}),
    "zero3": ("ZeRO3Strategy", {}),
    "tensor_parallel": ("TensorParallelStrategy", {"plan": {"layer": "colwise_gather_output"}}),
    "local_sgd": ("LocalSGDStrategy", {"sync_every": 1}),
    "elastic": ("ElasticStrategy", {"min_ranks": 1, "snapshot_every": 1}),
}


class Dies(Callback):
    """Ends rank 1 in the third step, as SIGKILL does."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run_of(kind: str, backend: str, devices: int, num_nodes: int) -> float:
    """Train in one way; return the sum of the weights."""
    model, data = _made()
    if kind == "fabric":
        return _loop(model, data, backend, devices, num_nodes)
    name, _, dies = kind.partition(", ")
    scheme, options = _KINDS[name]
    trainer = cpu_trainer(
        strategy=getattr(lightning_shard, scheme)(backend=backend, timeout=60, **options),
        devices=devices,
        num_nodes=num_nodes,
        max_steps=NUM_STEPS,
        callbacks=[Dies()] if dies else [],
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    return _total(trainer.strategy.lightning_module_state_dict())


def _loop(model: Model, data: TensorDataset, backend: str, devices: int, num_nodes: int) -> float:
    strategy = of_fabric.ZeRO3Strategy(backend=backend, timeout=60)
    made = Fabric(strategy=strategy, accelerator="cpu", devices=devices, num_nodes=num_nodes)
    made.launch()
    module, optimizer = made.setup(model, model.configure_optimizers())
    for index, samples in enumerate(data.tensors[0].split(4 * NUM_RANKS)):
        own = samples[made.global_rank :: made.world_size]
        made.backward(module.training_step([own], index))
        optimizer.step()
        optimizer.zero_grad()
    return _total(module.state_dict())


def expected_of(kind: str) -> float:
    """Return the sum of the weights of a run that is alone in its process."""
    if kind != "fabric":  # a Trainer shuffles what it assigns to ranks
        return run_of("zero2", "in_process", NUM_RANKS, 1)
    model, data = _made()
    optimizer = model.configure_optimizers()
    for index, samples in enumerate(data.tensors[0].split(4 * NUM_RANKS)):
        model.training_step([samples], index).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _total(model.state_dict())


def _made() -> tuple[Model, TensorDataset]:
    pl.seed_everything(1, verbose=False)
    return Model(0.0), TensorDataset(torch.randn(4 * NUM_RANKS * NUM_STEPS, 8))


def _total(weights: Any) -> float:
    return float(sum(one.double().sum() for one in weights.values()))


def train(kinds: Sequence[str], num_nodes: int = 1) -> list[float]:
    """Train in each way on real ranks, some of which a host has; for `run_processes`."""
    ignore_upstream_warnings()
    if num_nodes > 1:
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    totals = [run_of(kind, "gloo", NUM_RANKS // num_nodes, num_nodes) for kind in kinds]
    assert dist.get_world_size() == NUM_RANKS
    return totals


def main(folder: Path, kinds: Sequence[str]) -> None:
    """Train in each way, and write what came out of each into a file of this rank."""
    torch.set_num_threads(1)
    for number, kind in enumerate(kinds):
        told = json.dumps(run_of(kind, "gloo", NUM_RANKS, 1))
        (folder / f"{number}-{dist.get_rank()}").write_text(told)


if __name__ == "__main__":
    ignore_upstream_warnings()
    main(Path(sys.argv[1]), sys.argv[2:])
