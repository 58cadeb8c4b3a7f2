"""What a dry run says is what a real run holds and sends."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import AXES, Axis, ParallelMesh
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.errors import ConfigError
from lightning_shard.planning.report import DryRun
from tests.strategies.models import CONTEXT, ExampleGPT, Trained, gpt2
from tests.strategies.parity import GLOBAL_BATCH, GlobalBatches, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring(
    r".* microbatches are fewer than the .* stages", "A step uses .* parameters outside of their"
)

WORLD = 8
NUM_STEPS = 4  # in the fourth, unlike in the first three, ranks do not compare their results
SIZES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


@dataclass
class Census(L.Callback):
    """Counts on every rank; after the fit rank 0's copy has the figures of all ranks.

    Attributes:
        sent: Each rank's bytes of the last step, along each axis.
    """

    held: list[HeldBytes] = field(default_factory=list)
    sent: list[dict[Axis, int]] = field(default_factory=list)
    _held: HeldBytes | None = None
    _totals: list[dict[Axis, int]] = field(default_factory=list)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.engine.edits.are_expected = False  # the next hook only looks

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._held = trainer.strategy.held_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._totals.append(totals(trainer.strategy.mesh, trainer.strategy.mesh_rank))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        dp = trainer.strategy.collectives
        before, after = self._totals[-2:]
        self.held = dp.all_gather_object(self._held)
        self.sent = dp.all_gather_object({axis: after[axis] - before[axis] for axis in AXES})


def totals(mesh: ParallelMesh, rank: int) -> dict[Axis, int]:
    """Add up what a rank has sent in the groups that lie along one axis."""
    found = dict.fromkeys(AXES, 0)
    for group in Collectives.traffic_by_group():
        for axis in AXES:
            if len(group.ranks) > 1 and set(group.ranks) <= set(mesh.peers(axis, rank)):
                found[axis] += sum(one.bytes for one in group.traffic.values())
    return found


def both(
    model: Trained, make: Callable[[], HybridParallelStrategy], precision: str = "32-true"
) -> tuple[Census, DryRun]:
    """Return what a fit has counted, and what the dry run before it has said."""
    census, strategy = Census(), make()
    size = GLOBAL_BATCH // replicas(strategy)
    batch = [one[:size].to("meta") for one in model.data(size).tensors]
    dry = strategy.dry_run(model, batch, world_size=WORLD, precision=precision)
    quiet_trainer(
        strategy=strategy,
        devices=WORLD,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        precision=precision,
        callbacks=[census],
    ).fit(model, datamodule=GlobalBatches(model, num_steps=NUM_STEPS))
    return census, dry


def replicas(strategy: HybridParallelStrategy) -> int:
    return WORLD // prod(one.size or 1 for one in strategy.dimensions)


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


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero_stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3]
)
def test_a_real_run_holds_and_sends_the_same(zero_stage: int) -> None:
    assert_same(*both(ExampleGPT(num_layers=4), hybrid(zero_stage=zero_stage)))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "num_microbatches": 4},  # of 2, 2, 1 and 1 samples
        {"schedule": "interleaved_1f1b", "num_microbatches": 4, "zero_stage": 2},
        {"schedule": "zbv", "num_microbatches": 4},
        {"split": "flops"},
        {"schedule": "interleaved_1f1b", "num_microbatches": 4, "zero_stage": 3},
        {"schedule": "zbv", "num_microbatches": 4, "zero_stage": 3},
        {"pipeline_parallel_size": 1, "data_parallel_size": (2, 2), "zero_stage": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@SLOW
def test_so_does_one_with_other_options(options: dict[str, Any]) -> None:
    model = ExampleGPT(num_layers=4)
    census, dry = both(model, hybrid(**options))
    assert_same(census, dry)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, *(pytest.param(one, marks=SLOW) for one in (2, 3))])
def test_so_does_one_of_mixed_precision_with_tied_embeddings(zero_stage: int) -> None:
    model = ExampleGPT(num_layers=2)
    model.head.weight = model.byte_embedding.weight
    assert_same(*both(model, hybrid(zero_stage=zero_stage), precision="bf16-mixed"))


class DecaysByLoss(ExampleGPT):
    """Its loss, which the last stage computes, has a term of the first stage's parameter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = self.byte_embedding.weight
        return super().training_step(batch, batch_idx) + 0.01 * weights.square().mean()


@SLOW
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_so_does_one_whose_stages_lend_each_other(zero_stage: int) -> None:
    """Such a step, which trains, was refused."""
    assert_same(
        *both(
            DecaysByLoss(num_layers=2),
            hybrid(tensor_parallel_size=1, plan="auto", zero_stage=zero_stage),
        )
    )


def test_stages_that_lend_each_other_shares_of_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not count what layers that share their values"):
        hybrid()().dry_run(DecaysByLoss(num_layers=2), text(6), world_size=8)


def text(batch_size: int) -> list[Tensor]:
    return [torch.zeros(batch_size, CONTEXT, dtype=torch.long, device="meta") for _ in range(2)]


@pytest.mark.slow
def test_a_simulated_world_of_4096_ranks_says_the_same_of_each_pipeline() -> None:
    few, many = (
        hybrid(zero_stage=1, backend="auto")().dry_run(ExampleGPT(), text(6), world_size=size)
        for size in (8, 4096)
    )
    assert (many.mesh.dp, len(many.ranks)) == (1024, 2)
    for small, large in zip(few.ranks, many.ranks, strict=True):
        assert large.memory.parameters >= small.memory.parameters  # padded to whole shards
        assert large.memory.optimizer_state < small.memory.optimizer_state
        assert large.sent["tp"] == small.sent["tp"]
        assert large.idle_share == small.idle_share


def test_the_module_and_the_random_stream_stay_as_they_were() -> None:
    model = ExampleGPT()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    state = torch.get_rng_state()
    hybrid()().dry_run(model, text(6), world_size=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_more_microbatches_keep_no_more_activations_under_1f1b() -> None:
    few, many = (
        hybrid(num_microbatches=num)().dry_run(ExampleGPT(), text(num), world_size=8)
        for num in (4, 8)
    )
    for first, second in zip(few.ranks, many.ranks, strict=True):
        assert first.memory.activations == second.memory.activations
        assert 2 * first.sent["tp"] == second.sent["tp"]


def test_each_axis_alone() -> None:
    batch, gpt = text(4), ExampleGPT()
    stages = PipelineParallelStrategy(pipeline_parallel_size=3).dry_run(gpt, batch, world_size=6)
    parts = TensorParallelStrategy(plan=PLANS["gpt"]).dry_run(gpt, batch, world_size=4)
    assert [bool(stages.ranks[0].sent[axis]) for axis in AXES] == [True, True, False]
    assert [bool(parts.ranks[0].sent[axis]) for axis in AXES] == [False, False, True]
    assert (parts.schedule, parts.idle_share) == ("", 0.0)


def test_a_found_plan_and_a_hugging_face_model() -> None:
    model = gpt2()
    (batch,) = model.data(4).tensors
    strategy = HybridParallelStrategy(**SIZES, num_microbatches=2)
    dry = strategy.dry_run(model, [batch], world_size=8)
    assert dry.num_parameters == sum(param.numel() for param in model.parameters())
    assert all(one.sent["tp"] for one in dry.ranks)


def test_the_table_says_what_it_is_about() -> None:
    told = str(hybrid()().dry_run(ExampleGPT(), text(6), world_size=16, ranks_per_node=1))
    assert "55,072 parameters on 16 ranks: pp 2, dp 4, tp 2, ZeRO stage 1" in told
    assert "1f1b, 3 microbatches, 24 samples a step; idle 25.0%" in told
    assert "tp groups cross nodes of 1 ranks" in told


def test_a_plan_cannot_be_found_without_values() -> None:
    with torch.device("meta"):
        model = ExampleGPT()
    with pytest.raises(ConfigError, match="tries layers of ExampleGPT out, but its parameters are"):
        HybridParallelStrategy(**SIZES).dry_run(model, text(6), world_size=8)


class Curious(ExampleGPT):
    """Stops when the loss is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        assert loss.item() == loss.item()
        return loss


def test_a_step_that_asks_for_elements_is_explained() -> None:
    with pytest.raises(ConfigError, match="A dry run takes a step of Curious on tensors without"):
        hybrid()().dry_run(Curious(), text(6), world_size=8)


class Scaled(L.LightningModule):
    """A parameter of the module's own is used beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.embed(rows) * self.scale
        for block in self.blocks:
            found = block(found).tanh()
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


class Penalized(Scaled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].detach().requires_grad_()
        found = self(rows)
        (grad,) = torch.autograd.grad(found.sum(), rows, create_graph=True)
        return found.square().mean() + grad.square().mean()


def test_what_another_stage_has_holds_nothing_here() -> None:
    """The bytes of another stage's parameter were asked for, and the dry run refused the model."""
    strategy = PipelineParallelStrategy(num_microbatches=2)
    first, last = strategy.dry_run(Scaled(), [torch.zeros(4, 4)], world_size=2).ranks
    assert (first.num_parameters, last.num_parameters) == (4 * 8 + 8 + 8 + 9 * 8, 8 + 9 * 8)
    assert last.memory.activations > 0


class DecaysByItself(Scaled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.embed.weight.square().mean()


def test_what_a_stage_is_lent_is_sent_there_and_its_gradient_back() -> None:
    """The dry run refused the model, which trains."""
    strategy, batch = PipelineParallelStrategy(num_microbatches=2), [torch.zeros(4, 4)]
    without, found = (
        strategy.dry_run(model, batch, world_size=2).ranks for model in (Scaled(), DecaysByItself())
    )
    lent = 4 * 4 * 8
    for before, rank in zip(without, found, strict=True):
        assert rank.sent["pp"] == before.sent["pp"] + lent


def test_all_random_streams_stay_as_they_were() -> None:
    """A stage's run of a microbatch sets the seeds of numpy's and Python's numbers, too."""
    random.seed(0)
    np.random.seed(0)
    PipelineParallelStrategy().dry_run(Scaled(), [torch.zeros(4, 4)], world_size=2)
    found = random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    assert found == (random.random(), np.random.rand())


class OwnLabels(L.LightningModule):
    """Makes its labels of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.embed(batch[0].argmax(-1)))
        return nn.functional.cross_entropy(logits, batch[0].argmin(-1))


def test_labels_that_a_step_makes_are_not_asked_for_elements() -> None:
    """Sharded logits asked whether labels are in range, which these cannot say."""
    plan = {"head": "colwise"}
    batch = [torch.empty(4, 8, device="meta")]
    found = TensorParallelStrategy(plan=plan).dry_run(OwnLabels(), batch, world_size=2)
    assert found.ranks[0].sent["tp"] > 0


def test_a_pipeline_refuses_a_penalty_on_inputs_as_in_a_fit() -> None:
    """Torch's error was told, with the advice to ask for shapes only."""
    strategy = PipelineParallelStrategy(num_microbatches=2)
    with pytest.raises(ConfigError, match="asks for gradients of what earlier stages"):
        strategy.dry_run(Penalized(), [torch.zeros(4, 4)], world_size=2)


def test_sizes_that_do_not_fit_the_simulated_world_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot be split into groups of"):
        hybrid()().dry_run(ExampleGPT(), text(6), world_size=6)
