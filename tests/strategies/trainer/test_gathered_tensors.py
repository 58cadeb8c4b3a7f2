"""Tensors that `self.all_gather` brings together."""

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.strategies.trainer.gathered_tensors import gathered
from lightning_shard.testing import assert_traffic


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sync_grads", [False, True])
def test_a_value_of_another_stage_went_to_the_group_without_elements(
    rank: int, sync_grads: bool
) -> None:
    group = dist.group.WORLD
    assert group is not None
    collectives = InProcessBackend().collectives(group)
    value = Placeholder.of(torch.ones(1), (3, 4), "embed.weight")
    with assert_traffic(collectives):
        result = gathered(value, collectives, sync_grads=sync_grads)
    assert is_placeholder(result)
    assert result.shape == (2, 3, 4)
