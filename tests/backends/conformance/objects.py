"""`torch.distributed`'s collectives of picklable objects."""

import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check


def thing(rank: int) -> dict[str, object]:
    """Return an object whose pickle has another length on each rank."""
    return {"rank": rank, "text": "x" * (10 * rank + 1)}


@check
def all_gather_object(collectives: Collectives) -> None:
    gathered: list[object] = [None] * collectives.size
    dist.all_gather_object(gathered, thing(collectives.rank), group=collectives.group)
    assert gathered == [thing(rank) for rank in range(collectives.size)]


@check
def broadcast_object_list(collectives: Collectives) -> None:
    for root in range(collectives.size):
        box = [thing(collectives.rank), None if collectives.rank != root else "second"]
        dist.broadcast_object_list(box, group=collectives.group, group_src=root)
        assert box == [thing(root), "second"]


@check
def gather_object(collectives: Collectives) -> None:
    root = collectives.size - 1
    gathered: list[object] | None = None
    if collectives.rank == root:
        gathered = [None] * collectives.size
    dist.gather_object(thing(collectives.rank), gathered, group=collectives.group, group_dst=root)
    if gathered is not None:
        assert gathered == [thing(rank) for rank in range(collectives.size)]


@check
def scatter_object_list(collectives: Collectives) -> None:
    box: list[object] = [None]
    given = [thing(rank) for rank in range(collectives.size)]
    dist.scatter_object_list(
        box, given if collectives.rank == 0 else None, group=collectives.group, group_src=0
    )
    assert box == [thing(collectives.rank)]


@check
def send_object_list(collectives: Collectives) -> None:
    if collectives.rank == 0:
        for peer in range(1, collectives.size):
            dist.send_object_list([thing(peer), 7], group=collectives.group, group_dst=peer)
    else:
        box: list[object] = [None, None]
        dist.recv_object_list(box, group=collectives.group, group_src=0)
        assert box == [thing(collectives.rank), 7]
