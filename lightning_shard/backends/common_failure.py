"""Whether all ranks have raised at the same place: then their groups work still.

Ranks in lockstep often fail alike: the same batch has a NaN, the same disk is full. They can still
save together. A rank that has raised alone leaves its peers waiting for what never comes, so that
nothing can be done together any more.
"""

import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process import ElasticWorld, current_world

_BETWEEN_TWO = ("send", "recv")  # of which neighbours in a pipeline make different numbers


def all_raise(error: BaseException) -> bool:
    """Tell the other ranks that this one has raised, and find out whether all have.

    Args:
        error: The exception that this rank has raised. Each rank that has raised may call by
            itself.

    Returns:
        Whether all ranks have raised, after the same calls. If not, the other ranks are told; in
            process they go on, and find out when they need this rank.
    """
    world = current_world()
    if isinstance(world, ElasticWorld):
        return world.all_raise(error)
    lifeline = liveness.current()
    if lifeline is None:
        return dist.is_initialized() and dist.get_world_size() == 1
    calls = sum(
        traffic.calls
        for group in Collectives.traffic_by_group()
        for operation, traffic in group.traffic.items()
        if operation not in _BETWEEN_TWO
    )
    return lifeline.fail(error, calls)
