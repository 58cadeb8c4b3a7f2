"""Objects sent among the ranks of a group, in tensors: first how many bytes, then those.

c10d's own object collectives unpickle whatever comes.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends._c10d import exchange_objects_as, object_device
from lightning_shard.backends.objects import pack, unpack


def guard_torch() -> None:
    """Have c10d's own object collectives unpickle nothing that bears no code of this job."""
    exchange_objects_as(pack, partial(unpack, whose="An object collective of torch"))


def gather_objects(group: dist.ProcessGroup, obj: Any) -> list[Any]:
    """Return the objects of all ranks of a group, each of which must call, in their order.

    Raises:
        RankFailedError: What came in a rank's place bears no code of this job.
    """
    device, num_ranks = object_device(group), group.size()
    own = _bytes(pack(obj), device)
    own_size = torch.tensor([own.numel()], dtype=torch.long, device=device)
    sizes = [torch.empty_like(own_size) for _ in range(num_ranks)]
    dist.all_gather(sizes, own_size, group=group)
    num_bytes = [int(size) for size in sizes]
    padded = own.new_zeros(max(num_bytes))  # (longest,)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [
        _object(data[:size], group, "all_gather_object", rank)
        for rank, (data, size) in enumerate(zip(gathered, num_bytes, strict=True))
    ]


def broadcast_object(group: dist.ProcessGroup, obj: Any, src: int) -> Any:
    """Return the object of the group's rank `src`; every rank of the group must call.

    Raises:
        RankFailedError: What came in the rank's place bears no code of this job.
    """
    device = object_device(group)
    data = _bytes(pack(obj) if group.rank() == src else b"", device)
    size = torch.tensor([data.numel()], dtype=torch.long, device=device)
    dist.broadcast(size, group=group, group_src=src)
    if group.rank() != src:
        data = data.new_empty(int(size))
    dist.broadcast(data, group=group, group_src=src)
    return _object(data, group, "broadcast_object", src)


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        if data
        else (torch.empty(0, dtype=torch.uint8, device=device))
    )


def _object(data: Tensor, group: dist.ProcessGroup, operation: str, source: int) -> Any:
    whose = f"Rank {group.rank()} of {group.size()} in {operation}, from rank {source}"
    return unpack(data.cpu().numpy().tobytes(), whose)
