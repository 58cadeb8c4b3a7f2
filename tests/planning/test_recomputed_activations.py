"""What a dry run says of activations is what a real run saves, with and without checkpointing."""

from typing import Any

import pytest
from torch import Tensor

from lightning_shard import PipelineParallelStrategy, TensorParallelStrategy
from lightning_shard.pipeline_parallel.costs import SavedBytes
from tests.planning.test_dry_run import text
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GLOBAL_BATCH, GlobalBatches, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring(r".* microbatches are fewer than the .* stages")
SLOW = pytest.mark.slow


class Measured(ExampleGPT):
    """Counts what autograd saves for its backward, and what is computed again there."""

    saved: SavedBytes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        flats = self.trainer.strategy.engine.flats
        self.saved = SavedBytes([*batch, *(flat.full for flat in flats)])
        with self.saved:
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any) -> None:  # type: ignore[override]
        with self.saved.backward():
            super().backward(loss, *args)


def measured(strategy: Any) -> SavedBytes:
    model = Measured()
    quiet_trainer(
        strategy=strategy, devices=2, max_steps=1, accumulate_grad_batches=1, gradient_clip_val=None
    ).fit(model, datamodule=GlobalBatches(model, num_steps=1))
    return model.saved


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("choice", [pytest.param(None, marks=SLOW), "full", "selective"])
def test_tensor_parallel(choice: Any, sequence_parallel: bool) -> None:
    strategy = TensorParallelStrategy(
        backend="in_process",
        plan=PLANS["gpt"],
        sequence_parallel=sequence_parallel,
        activation_checkpointing=choice,
    )
    (rank,) = strategy.dry_run(ExampleGPT(), text(GLOBAL_BATCH), world_size=2).ranks
    saved = measured(strategy)
    assert rank.memory.activations == pytest.approx(saved.total, rel=0.1)
    assert rank.memory.recomputed == pytest.approx(saved.recomputed, rel=0.1)
    assert bool(saved.recomputed) == (choice is not None)


def of_stages(choice: Any, schedule: str = "1f1b", **options: Any) -> Any:
    strategy = PipelineParallelStrategy(
        backend="in_process",
        schedule=schedule,
        num_microbatches=4,
        activation_checkpointing=choice,
        **options,
    )
    model = ExampleGPT(num_layers=8)
    return strategy.dry_run(model, text(GLOBAL_BATCH), world_size=2)


@pytest.mark.slow
def test_stages_keep_the_inputs_of_their_blocks() -> None:
    plain, full, selective = map(of_stages, (None, "full", "selective"))
    for kept, some, every in zip(full.ranks, selective.ranks, plain.ranks, strict=True):
        assert kept.memory.activations < some.memory.activations < every.memory.activations
        assert kept.memory.total < every.memory.total
        assert kept.memory.recomputed > 0 == every.memory.recomputed
        assert kept.sent == every.sent


@pytest.mark.slow
def test_halves_of_a_backward_are_joined() -> None:
    """Each would compute the block again; the idle share says what that costs."""
    plain, full = of_stages(None, "zbv"), of_stages("full", "zbv")
    assert full.idle_share > plain.idle_share
    assert "recomputed" in str(full)


@pytest.mark.slow
def test_stages_of_like_memory_are_measured_with_checkpoints() -> None:
    plain, full = (of_stages(choice, split="memory") for choice in (None, "full"))
    blocks = [[one.num_blocks for one in dry.ranks] for dry in (plain, full)]
    assert blocks[0] != blocks[1]  # the head's logits weigh more where blocks save less
