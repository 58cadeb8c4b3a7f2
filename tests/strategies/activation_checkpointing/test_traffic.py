"""What is computed again is not gathered again, and what is sent is as without checkpointing."""

from typing import Any

import pytest

from lightning_shard import TensorParallelStrategy, ZeRO3Strategy
from tests.planning.test_dry_run import text
from tests.strategies.data_parallel.test_held_bytes_and_traffic import Census, OnlyBlocks
from tests.strategies.models import CONTEXT, ExampleGPT, Trained
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()
SLOW = pytest.mark.slow
Sent = dict[str, int]


def sent(model: Trained, strategy: Any, num_ranks: int) -> tuple[Sent, Census]:
    """Return the elements that rank 0 sends in its last step, by operation, and all figures."""
    census = Census()
    quiet_trainer(
        strategy=strategy,
        devices=num_ranks,
        callbacks=[census],
        max_steps=3,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    ).fit(model, datamodule=GlobalBatches(model, num_steps=3))
    return {name: one.elements for name, one in census.sent[0][-1].items()}, census


@pytest.mark.parametrize("choice", ["full", pytest.param("selective", marks=SLOW)])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=SLOW)])
def test_stage_3_gathers_each_block_once_for_forward_and_once_for_backward(
    choice: Any, num_ranks: int
) -> None:
    strategy = ZeRO3Strategy(
        backend="in_process", bucket_mb=SMALL_BUCKET_MB, activation_checkpointing=choice
    )
    elements, census = sent(OnlyBlocks(), strategy, num_ranks)
    once = census.blocks * (num_ranks - 1) // num_ranks
    assert census.root_numel == 0
    assert elements["all_gather"] == 2 * once
    assert elements["reduce_scatter"] == once


@SLOW
@pytest.mark.parametrize("choice", ["full", ["LayerNorm", "Linear"]], ids=str)
def test_it_is_as_much_as_without(choice: Any) -> None:
    def of(choice: Any) -> Sent:
        strategy = ZeRO3Strategy(
            backend="in_process", bucket_mb=SMALL_BUCKET_MB, activation_checkpointing=choice
        )
        return sent(ExampleGPT(), strategy, 2)[0]

    assert of(choice) == of(None)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_exchanges_activations_of_a_block_again_but_the_last(
    sequence_parallel: bool,
) -> None:
    """What ends a block is not computed again: nothing that backward needs comes after it."""
    model, batch = ExampleGPT(), text(4)

    def of(choice: Any) -> int:
        strategy = TensorParallelStrategy(
            plan=PLANS["gpt"], sequence_parallel=sequence_parallel, activation_checkpointing=choice
        )
        (rank,) = strategy.dry_run(model, batch, world_size=2).ranks
        return rank.sent["tp"]

    activation = 4 * 4 * CONTEXT * 32  # bytes of (B, T, C), which an all-reduce of two ranks sends
    again = 3 * activation // 2 if sequence_parallel else activation
    assert of("full") - of(None) == of("selective") - of(None) == len(model.blocks) * again
