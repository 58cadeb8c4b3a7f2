"""In-process data-parallel ranks with several copies of the state."""

import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.data_groups import DataGroups


def in_copies(num_copies: int) -> DataGroups:
    """Share the state out over all ranks in so many copies; each rank must call."""
    backend = get_backend("in_process")
    assert dist.group.WORLD is not None
    dp = backend.collectives(dist.group.WORLD)
    if num_copies == 1:
        return DataGroups.of(dp)
    ranks, size = range(dp.size), dp.size // num_copies
    first, place = dp.rank // size * size, dp.rank % size

    def over(members: range) -> Collectives:
        return backend.collectives(dist.new_group([*members], use_local_synchronization=True))

    shard, replicate = over(ranks[first : first + size]), over(ranks[place::size])
    return DataGroups(dp=dp, shard=shard, replicate=replicate)
