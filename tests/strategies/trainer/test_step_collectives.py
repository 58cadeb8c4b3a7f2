"""Tensors that `self.all_gather` brings together; what `torch.distributed` is asked in a step."""

import pytest
import torch
import torch.distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.strategies.trainer.step_collectives import default_group_is, gathered
from lightning_shard.testing import assert_traffic, run_ranks
from tests.groups import all_ranks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sync_grads", [False, True])
def test_a_value_of_another_stage_does_not_go_to_the_group(rank: int, sync_grads: bool) -> None:
    """A value of another stage went to the group without elements."""
    collectives = all_ranks()
    value = Placeholder.of(torch.ones(1), (3, 4), "embed.weight")
    with assert_traffic(collectives):
        result = gathered(value, collectives, sync_grads=sync_grads)
    assert is_placeholder(result)
    assert result.shape == (2, 3, 4)


def test_functions_are_made_once() -> None:
    """Each entry, of which a step has two, read the signatures of 18 functions: half a ms."""

    def fn(rank: int) -> bool:
        assert dist.group.WORLD is not None
        made = []
        for _ in range(2):
            with default_group_is(dist.group.WORLD):
                made.append(dist.all_reduce)
        return made[0] is made[1] is not dist.all_reduce

    assert run_ranks(fn, 1) == [True]


@pytest.mark.ranks(2)
def test_the_default_group_is_the_steps_also_where_it_is_named(rank: int) -> None:
    """`gather_all_tensors` of torchmetrics names it: each sample counted once for each process."""
    world = dist.group.WORLD
    own = [dist.new_group([one]) for one in range(2)][rank]
    for _ in range(2):
        with default_group_is(own):
            assert dist.group.WORLD is own
            assert [float(one) for one in gather_all_tensors(torch.tensor(float(rank)))] == [rank]
            count = torch.ones(1)
            dist.all_reduce(count, group=world)
            assert count == 2
    assert dist.group.WORLD is world
