"""What a dry run says is what a real run holds and sends."""

from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_shard import HybridParallelStrategy
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.mesh import AXES
from lightning_shard.planner.report import DryRun
from tests.strategies.models import CONTEXT, ExampleGPT, Trained
from tests.strategies.parity import UPSTREAM_WARNINGS, GlobalBatches, quiet_trainer
from tests.strategies.test_tensor_parallel import PLANS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]

WORLD = 8


@dataclass
class Census(L.Callback):
    """Counts on every rank; after the fit rank 0's copy has the figures of all ranks.

    Attributes:
        held: Each rank's bytes inside the last step.
        sent: Each rank's bytes of the second step, along each axis.
    """

    held: list[HeldBytes] = field(default_factory=list)
    sent: list[dict[str, int]] = field(default_factory=list)
    _held: HeldBytes | None = None
    _totals: list[dict[str, int]] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._held = trainer.strategy.held_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        groups = {"dp": strategy.data_collectives, "tp": strategy.along("tp")}
        groups["pp"] = strategy.along("pp")
        print(self._totals[-1:] , trainer.global_rank, {k:{a:(b.calls,b.bytes) for a,b in g.traffic.items()} for k,g in groups.items()})
        self._totals.append({axis: one.traffic.total_bytes for axis, one in groups.items()})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        everyone = trainer.strategy.collectives
        before, after = self._totals[-2:]
        self.held = everyone.all_gather_object(self._held)
        self.sent = everyone.all_gather_object({axis: after[axis] - before[axis] for axis in AXES})


def both(model: Trained, batch: list[torch.Tensor], **options: Any) -> tuple[Census, DryRun]:
    def strategy() -> HybridParallelStrategy:
        return HybridParallelStrategy(
            backend="in_process",
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            plan=PLANS["gpt"],
            **options,
        )

    dry, census = strategy().dry_run(model, batch, world_size=WORLD), Census()
    quiet_trainer(
        strategy=strategy(),
        devices=WORLD,
        max_steps=3,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        callbacks=[census],
    ).fit(model, datamodule=GlobalBatches(model, num_steps=3))
    return census, dry


def text(batch_size: int) -> list[torch.Tensor]:
    return [torch.zeros(batch_size, CONTEXT, dtype=torch.long, device="meta") for _ in range(2)]


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_real_run_holds_and_sends_the_same(zero_stage: int) -> None:
    census, dry = both(
        ExampleGPT(num_layers=4), text(6), zero_stage=zero_stage, num_microbatches=3
    )
    print(dry)
    for rank in range(WORLD):
        figures = dry.ranks[dry.mesh.coordinates(rank)["pp"]]
        print(rank, census.held[rank], census.sent[rank],dict(figures.sent))
    assert 0
