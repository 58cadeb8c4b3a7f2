"""Starting the default process group of real processes, which meet at rank 0's store."""

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_shard import settings
from lightning_shard.errors import RankFailedError


def join_world(
    backend: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    timeout: timedelta,
) -> None:
    """Start the default process group at MASTER_ADDR and MASTER_PORT; every rank must call.

    Args:
        backend: A name that c10d knows.
        rank: This process's number, 0 <= rank < world_size.
        world_size: Number of processes.
        device: The rank's own device, to which the group is then bound, or None.
        timeout: For the meeting and for every later operation.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing or wrong.
        RankFailedError: The ranks did not meet.
    """
    place = settings.rendezvous()
    try:
        # env:// rather than tcp://: it also joins the store that torchrun's agent keeps.
        dist.init_process_group(
            backend,
            init_method="env://",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device,
        )
    except dist.DistError as error:
        raise RankFailedError(
            f"Rank {rank} of {world_size} could not meet the others at MASTER_ADDR={place.host}, "
            f"MASTER_PORT={place.port} within {timeout}. Check that every rank was started, that "
            f"the address is rank 0's and that the port is free there. torch said: {error}"
        ) from error
