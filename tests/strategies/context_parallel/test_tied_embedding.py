"""A pipeline's last stage has a tied embedding, too, so it gives skipped blocks elements."""

import pytest
import torch

from lightning_shard import HybridParallelStrategy
from tests.strategies.context_parallel.test_twenty_steps import gemma3
from tests.strategies.models import Trained
from tests.strategies.parity import assert_parity, ignoring, train

pytestmark = ignoring(".*'__getitem__', which has no rule", ".*microbatches are fewer than the")


def build() -> Trained:
    torch.manual_seed(7)
    return gemma3()


@pytest.mark.slow
def test_ranks_do_not_wait_in_a_block_that_only_some_run() -> None:
    """Ranks waited for each other in a block that only some ran."""
    strategy = HybridParallelStrategy(
        context_parallel_size=2,
        pipeline_parallel_size=2,
        num_microbatches=2,
        zero_stage=1,
        backend="in_process",
        announce=False,
    )
    assert_parity(train(build(), strategy=strategy, devices=4), train(build()))
