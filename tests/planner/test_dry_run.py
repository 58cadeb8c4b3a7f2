"""What a dry run says is what a real run holds and sends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest

from lightning_shard import HybridParallelStrategy
from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.mesh import AXES, Axis, ParallelMesh
from lightning_shard.planner.report import DryRun
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from tests.strategies.models import ExampleGPT, Trained
from tests.strategies.parity import UPSTREAM_WARNINGS, GlobalBatches, quiet_trainer
from tests.strategies.test_tensor_parallel import PLANS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]

WORLD = 8
NUM_STEPS = 4  # in the fourth, unlike in the first three, ranks do not compare their results
SIZES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


@dataclass
class Census(L.Callback):
    """Counts on every rank; after the fit rank 0's copy has the figures of all ranks.

    Attributes:
        held: Each rank's bytes inside the last step.
        sent: Each rank's bytes of the last step, along each axis.
        peaks: The most runs that each rank's pipeline kept for their backward.
    """

    held: list[HeldBytes] = field(default_factory=list)
    sent: list[dict[Axis, int]] = field(default_factory=list)
    _held: HeldBytes | None = None
    _totals: list[dict[Axis, int]] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._held = trainer.strategy.held_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._totals.append(totals(trainer.strategy.mesh, trainer.global_rank))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        everyone = trainer.strategy.collectives
        before, after = self._totals[-2:]
        self.held = everyone.all_gather_object(self._held)
        self.sent = everyone.all_gather_object({axis: after[axis] - before[axis] for axis in AXES})


def totals(mesh: ParallelMesh, rank: int) -> dict[Axis, int]:
    """Add up what a rank has sent in the groups that lie along one axis."""
    found = dict.fromkeys(AXES, 0)
    for group in Collectives.traffic_by_group():
        for axis in AXES:
            if len(group.ranks) > 1 and set(group.ranks) <= set(mesh.peers(axis, rank)):
                found[axis] += sum(one.bytes for one in group.traffic.values())
    return found


def both(
    model: Trained,
    make: Callable[[], ModelParallelStrategy],
    precision: str = "32-true",
) -> tuple[Census, DryRun]:
    """Return what a fit has counted, and what the dry run before it has said."""
    census = Census()
    batch = [one[: 12 // 2] for one in model.data(12).tensors]
    dry = make().dry_run(
        model, [one.to("meta") for one in batch], world_size=WORLD, precision=precision
    )
    quiet_trainer(
        strategy=make(),
        devices=WORLD,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        precision=precision,
        callbacks=[census],
    ).fit(model, datamodule=GlobalBatches(model, num_steps=NUM_STEPS))
    return census, dry


def hybrid(**options: Any) -> Callable[[], HybridParallelStrategy]:
    defaults = SIZES | {"backend": "in_process", "plan": PLANS["gpt"], "num_microbatches": 3}
    return lambda: HybridParallelStrategy(**(defaults | options))


def assert_same(census: Census, dry: DryRun) -> None:
    for rank in range(WORLD):
        figures = dry.ranks[dry.mesh.coordinates(rank)["pp"]]
        held, memory = census.held[rank], figures.memory
        assert memory.parameters == held.parameters
        assert memory.gradients == held.gradients
        assert memory.optimizer_state == pytest.approx(held.optimizer_state, rel=0.01)  # and steps
        assert figures.sent["dp"] == census.sent[rank]["dp"]
        assert figures.sent["tp"] == census.sent[rank]["tp"]
        # what the last stage has logged goes to the others
        assert figures.sent["pp"] == pytest.approx(census.sent[rank]["pp"], rel=0.01)


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_real_run_holds_and_sends_the_same(zero_stage: int) -> None:
    assert_same(*both(ExampleGPT(num_layers=4), hybrid(zero_stage=zero_stage)))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "num_microbatches": 4},  # of 2, 2, 1 and 1 samples
        {"schedule": "interleaved_1f1b", "num_microbatches": 2, "zero_stage": 2},
        {"schedule": "zbv"},
        {"split": "flops"},
        {"schedule": "interleaved_1f1b", "num_microbatches": 2, "zero_stage": 3},
        {"pipeline_parallel_size": 1, "data_parallel_size": (2, 2), "zero_stage": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.slow
def test_so_does_one_with_other_options(options: dict[str, Any]) -> None:
    model = ExampleGPT(num_layers=4)
    census, dry = both(model, hybrid(**options))
    assert_same(census, dry)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_so_does_one_of_mixed_precision_with_tied_embeddings(zero_stage: int) -> None:
    model = ExampleGPT(num_layers=2)
    model.head.weight = model.byte_embedding.weight
    assert_same(*both(model, hybrid(zero_stage=zero_stage), precision="bf16-mixed"))
