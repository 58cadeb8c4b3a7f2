"""Starting the default process group of real processes, which meet at rank 0's store."""

from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightning_shard import settings
from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.errors import RankFailedError

# Ranks do not start at the same time: one may import for long on a busy host. That is no silence.
SHORTEST_MEETING = timedelta(minutes=1)

_meetings = count()


def join_world(
    backend: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    timeout: timedelta,
) -> None:
    """Start the default process group at MASTER_ADDR and MASTER_PORT; every rank must call.

    And with it the lifeline, by which the ranks know of each other's end.

    Args:
        backend: A name that c10d knows.
        rank: This process's number, 0 <= rank < world_size.
        world_size: Number of processes.
        device: The rank's own device, to which the group is then bound, or None.
        timeout: For every operation, and for the meeting if it is longer than a minute.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing or wrong.
        RankFailedError: The ranks did not meet.
    """
    place = settings.rendezvous()
    patience = max(timeout, SHORTEST_MEETING)
    meeting = f"lightning_shard/meeting/{next(_meetings)}"  # torchrun's store keeps the last one's
    try:
        # env:// rather than tcp://: it also joins the store that torchrun's agent keeps.
        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=patience))
        store = PrefixStore(meeting, store)
        _await_all(store, rank, world_size, patience)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=PrefixStore("default_pg", store),  # as c10d does with a store of its own
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device,
        )
    except RuntimeError as error:
        if not is_about_a_peer(error):
            raise
        raise RankFailedError(
            f"Rank {rank} of {world_size} could not meet the others at MASTER_ADDR={place.host}, "
            f"MASTER_PORT={place.port} within {patience}. Check that every rank was started, that "
            f"the address is rank 0's and that the port is free there. torch said: {error}"
        ) from error
    liveness.start(store, rank=rank, world_size=world_size, host=place.host, timeout=timeout)


def _await_all(store: Store, rank: int, world_size: int, patience: timedelta) -> None:
    """Wait for every rank: the rendezvous has rank 0 alone do so, torchrun's not even that."""
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)], patience)
