"""What `torch.distributed` is asked in a step."""

import torch.distributed as dist

from lightning_shard.strategies.trainer.default_group import default_group_is
from lightning_shard.testing import run_ranks


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
