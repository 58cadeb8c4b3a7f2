"""What Ray Train runs on its workers here, and in this process to compare."""

import json
import os
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.ray import (
    RayReportCallback,
    dataset_batches,
    latest_checkpoint,
    prepare_trainer,
)
from tests.trainers import cpu_trainer

NUM_STEPS = 20
SCHEMES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "shard_ddp": (DDPStrategy, {}),
    "zero1": (ZeRO1Strategy, {}),
    "zero2": (ZeRO2Strategy, {}),
    "zero3": (ZeRO3Strategy, {}),
    "tensor_parallel": (TensorParallelStrategy, {"tensor_parallel_size": 2}),
    "pipeline_parallel": (PipelineParallelStrategy, {"num_microbatches": 4}),
    "hybrid_parallel": (
        HybridParallelStrategy,
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2},
    ),
    "local_sgd": (LocalSGDStrategy, {"sync_every": 4}),
    "async_sgd": (AsyncSGDStrategy, {"staleness_bound": 0}),
    "elastic": (ElasticStrategy, {"scheme": "zero2", "min_ranks": 1, "snapshot_every": 2}),
}


class Block(nn.Module):
    """A feed-forward block, which tensor parallel splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Net(L.LightningModule):
    """Four blocks, which a pipeline cuts into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        outputs = self.last(self.blocks(self.first(inputs)))
        loss = nn.functional.mse_loss(outputs, targets)
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(L.Callback):
    """Notes each step's loss, averaged over the ranks, and the number of ranks."""

    def __init__(self, log: Path | None = None) -> None:
        self.noted: list[float] = []
        self._log = log

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean"))
        self.noted.append(loss)
        if self._log is not None and trainer.is_global_zero:
            with self._log.open("a") as file:
                file.write(f"{trainer.global_step} {loss!r} {trainer.world_size}\n")


class Kill(L.Callback):
    """Kills the process of one rank behind a step, once.

    Args:
        mark: A file that says that it was done.
    """

    def __init__(self, rank: int, step: int, mark: Path) -> None:
        self._rank, self._step, self._mark = rank, step, mark

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        is_now = (trainer.global_rank, trainer.global_step) == (self._rank, self._step)
        if is_now and not self._mark.exists():
            import ray.train

            ray.train.get_all_reported_checkpoints()  # waits until Ray has taken them up
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(strategy: Any, callbacks: list[Any], **flags: Any) -> L.Trainer:
    warnings.filterwarnings("ignore")
    flags = {"max_steps": NUM_STEPS, "enable_checkpointing": True} | flags
    return cpu_trainer(strategy=strategy, callbacks=callbacks, **flags)


def samples(num: int) -> TensorDataset:
    inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def strategy_of(scheme: str, **options: Any) -> Any:
    kind, own = SCHEMES[scheme]
    return kind(**own, **options)


def losses_in_process(scheme: str, num_ranks: int, max_epochs: int = 1) -> list[float]:
    """Train in this process as `every_scheme` does."""
    losses = Losses()
    strategy = strategy_of(scheme, backend="in_process")
    trainer = make_trainer(
        strategy, [losses], devices=num_ranks, max_epochs=max_epochs, enable_checkpointing=False
    )
    L.seed_everything(5, verbose=False)
    trainer.fit(Net(), DataLoader(samples(8 * num_ranks * NUM_STEPS), batch_size=8, shuffle=True))
    return losses.noted


def every_scheme(config: dict[str, Any]) -> None:
    """Train under one scheme after the other, and write down what each rank has seen."""
    for scheme in config["schemes"]:
        losses = Losses()
        trainer = make_trainer(strategy_of(scheme), [losses], enable_checkpointing=False)
        prepare_trainer(trainer)
        L.seed_everything(5, verbose=False)
        num_samples = 8 * trainer.world_size * NUM_STEPS
        trainer.fit(Net(), DataLoader(samples(num_samples), batch_size=8, shuffle=True))
        place = (trainer.local_rank, trainer.node_rank, trainer.world_size)
        told = Path(config["folder"], f"{scheme}-{trainer.global_rank}")
        told.write_text(repr({"losses": losses.noted, "place": place}))


class Seen(L.Callback):
    """Notes the numbers of the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.batches.append(batch["id"].tolist())


class Rows(Net):
    """Trains on rows of a Ray dataset."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs = batch["id"].float()[:, None].expand(-1, 4) / 64
        return super().training_step((inputs, inputs.sum(1, keepdim=True)), index)


def on_a_dataset(config: dict[str, Any]) -> None:
    """Train for two epochs on a Ray dataset, and report the rows that each rank was given."""
    import ray.train

    seen = Seen()
    trainer = make_trainer(
        strategy_of(config["scheme"]),
        [seen],
        max_steps=-1,
        max_epochs=2,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    prepare_trainer(trainer)
    L.seed_everything(5, verbose=False)
    trainer.fit(Rows(), dataset_batches(trainer, "rows", batch_size=4))
    trainer.strategy.barrier()
    ranks = trainer.strategy.collectives.all_gather_object(seen.batches)
    if trainer.is_global_zero:
        Path(config["folder"], "ranks").write_text(json.dumps(ranks))
    ray.train.report({"ranks": ranks})


class Stay(L.Callback):
    """Stays behind a step while there are so many ranks: somebody has to end them."""

    def __init__(self, num_ranks: int, step: int) -> None:
        self._num_ranks, self._step = num_ranks, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        while (trainer.world_size, trainer.global_step) == (self._num_ranks, self._step):
            time.sleep(0.1)


def shrinking(config: dict[str, Any]) -> None:
    """Train elastically, and wait at a step for a node to be taken away."""
    folder = Path(config["folder"])
    callbacks = [RayReportCallback(every_n_train_steps=5), Losses(folder / "log"), Stay(4, 8)]
    strategy = strategy_of("elastic", timeout=20.0)
    trainer = prepare_trainer(make_trainer(strategy, callbacks))
    L.seed_everything(5, verbose=False)
    loader = DataLoader(samples(8 * 4 * NUM_STEPS), batch_size=8, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=latest_checkpoint())


def killed_once(config: dict[str, Any]) -> None:
    """Train, lose a rank once, and go on from what was reported."""
    folder = Path(config["folder"])
    format_ = config["format"]
    kill = Kill(1, 13, folder / "killed")
    callbacks = [RayReportCallback(every_n_train_steps=5), Losses(folder / "log"), kill]
    strategy = strategy_of(config["scheme"], checkpoint_format=format_)
    trainer = prepare_trainer(make_trainer(strategy, callbacks))
    L.seed_everything(5, verbose=False)
    num_samples = 8 * trainer.world_size * NUM_STEPS
    loader = DataLoader(samples(num_samples), batch_size=8, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=latest_checkpoint())
