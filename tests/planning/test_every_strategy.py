"""Under every strategy a rank holds what the dry run has said, and its autograd saves that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

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
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.pipeline_parallel.costs import SavedBytes
from lightning_shard.pipeline_parallel.messages import RunningBatch
from lightning_shard.pipeline_parallel.schedules import Action
from lightning_shard.strategies.dimensions.pipeline import PipelineDimension
from tests.planning.test_dry_run import text
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GLOBAL_BATCH, UPSTREAM_WARNINGS, GlobalBatches, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        *UPSTREAM_WARNINGS,
        r".* microbatches are fewer than the .* stages",
        r".*offload",  # saves nothing on CPU ranks
    )
]
SLOW = pytest.mark.slow
Make = Callable[..., Any]
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 3}
PLAN: dict[str, Any] = {"plan": PLANS["gpt"]}
STRATEGIES: dict[str, tuple[int, int, Make]] = {  # ranks, and those with other samples
    "shard_ddp": (2, 2, DDPStrategy),
    "zero1": (2, 2, ZeRO1Strategy),
    "zero2": (2, 2, ZeRO2Strategy),
    "zero3": (2, 2, ZeRO3Strategy),
    "zero2_offload": (2, 2, partial(ZeRO2Strategy, offload="optimizer")),
    "zero3_offload": (2, 2, partial(ZeRO3Strategy, offload="parameters")),
    "zero3, offload='optimizer'": (2, 2, partial(ZeRO3Strategy, offload="optimizer")),
    "local_sgd": (2, 2, LocalSGDStrategy),
    "async_sgd": (2, 2, AsyncSGDStrategy),
    "elastic": (2, 2, ElasticStrategy),
    "tensor_parallel": (2, 1, partial(TensorParallelStrategy, **PLAN)),
    "pipeline_parallel": (2, 1, partial(PipelineParallelStrategy, **STAGES)),
    "hybrid_parallel": (
        8,
        2,
        partial(HybridParallelStrategy, **STAGES, **PLAN, tensor_parallel_size=2, zero_stage=2),
    ),
}


@dataclass
class Notes:
    """What one rank has noted.

    Attributes:
        held: Its bytes between the last step's backward and update.
        saved: What autograd saves of each run of the step.
        at_once: How many runs are kept at one time, at the most.
    """

    held: HeldBytes | None = None
    saved: list[int] = field(default_factory=list)
    at_once: int = 1
    is_pipelined: bool = False


class Measured(ExampleGPT):
    """Counts what rank 0, which has this object, holds and saves for its backwards."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        self.notes = Notes()

    @contextmanager
    def counting(self, batch: Any) -> Iterator[SavedBytes]:
        flats = self.trainer.strategy.engine.flats
        with SavedBytes([*batch, *(flat.full for flat in flats)]) as saved:
            yield saved
        self.notes.saved.append(saved.total)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.notes.is_pipelined:  # stages end the step early, and keep what they have sent
            return super().training_step(batch, batch_idx)
        with self.counting(batch):
            return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.notes.is_pipelined:
            return
        pipeline: Any = self.trainer.strategy.pipeline
        act = type(pipeline)._act

        def counted(running: RunningBatch, action: Action) -> None:
            with self.counting(batch) if action.kind == "F" else nullcontext() as saved:
                act(pipeline, running, action)
                if saved is not None:
                    run = running.runs[action.stage, action.microbatch]
                    saved.keep([*run.inputs, *run.outputs])

        pipeline._act = counted

    def on_before_optimizer_step(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.notes.held = strategy.held_bytes()
        if self.notes.is_pipelined:
            self.notes.at_once = strategy.pipeline.peak_activations


def measured(strategy: Any, num_ranks: int) -> Notes:
    model = Measured()
    model.notes.is_pipelined = bool(getattr(strategy, "dimensions", ())) and isinstance(
        strategy.dimensions[-1], PipelineDimension
    )
    quiet_trainer(
        strategy=strategy,
        devices=num_ranks,
        max_steps=3,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    ).fit(model, datamodule=GlobalBatches(model, num_steps=3))
    return model.notes


@pytest.mark.parametrize("choice", [pytest.param(None, marks=SLOW), "full"])
@pytest.mark.parametrize(
    "name", ["zero3", *(pytest.param(one, marks=SLOW) for one in STRATEGIES if one != "zero3")]
)
def test_a_rank_holds_and_saves_what_was_said(name: str, choice: Any) -> None:
    num_ranks, replicas, make = STRATEGIES[name]
    strategy = make(backend="in_process", activation_checkpointing=choice)
    with torch.device("meta"):
        model = ExampleGPT(num_layers=4)
    batch = text(GLOBAL_BATCH // replicas)
    told = strategy.dry_run(model, batch, world_size=num_ranks).ranks[0].memory
    notes = measured(strategy, num_ranks)
    assert notes.held is not None
    saved = notes.at_once * max(notes.saved)
    print(
        f"{name}, {choice}: parameters {told.parameters} {notes.held.parameters}, gradients "
        f"{told.gradients} {notes.held.gradients}, optimizer state {told.optimizer_state} "
        f"{notes.held.optimizer_state}, host {told.offloaded} {notes.held.offloaded}, "
        f"activations {told.activations} {saved}"
    )
    assert told.parameters == pytest.approx(notes.held.parameters, rel=0.01)
    assert told.gradients == pytest.approx(notes.held.gradients, rel=0.01)
    assert told.optimizer_state == pytest.approx(notes.held.optimizer_state, rel=0.01)
    assert told.offloaded == pytest.approx(notes.held.offloaded, rel=0.01)
    assert told.activations == pytest.approx(saved, rel=0.1)
