"""`torch.distributed`'s messages between two ranks, and its barriers.

On a group of one rank there is nobody to send to: such a check then has nothing to show.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check, check_each
from tests.backends.conformance.tensors import DTYPES, assert_same, values


def neighbours(collectives: Collectives) -> tuple[int, int]:
    """Return the group ranks ahead of and behind this one."""
    return (collectives.rank + 1) % collectives.size, (collectives.rank - 1) % collectives.size


@check_each(DTYPES)
def messages_of(collectives: Collectives, dtype: torch.dtype) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    received = torch.zeros(9, dtype=dtype)
    sending = dist.isend(
        values(collectives.rank, 9, dtype), group=collectives.group, group_dst=ahead
    )
    dist.recv(received, group=collectives.group, group_src=behind)
    sending.wait()
    assert_same(received, values(behind, 9, dtype))


@check
def a_blocking_send_meets_its_receive(collectives: Collectives) -> None:
    if collectives.rank == 0:
        for peer in range(1, collectives.size):
            dist.send(values(peer, 6).view(2, 3), group=collectives.group, group_dst=peer)
    else:
        received = torch.zeros(2, 3)
        source = dist.recv(received, group=collectives.group, group_src=0)
        assert source == 0
        assert_same(received, values(collectives.rank, 6).view(2, 3))


@check
def messages_are_told_apart_by_tag(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    group = collectives.group
    sent = [torch.full((3,), float(tag)) for tag in range(5)]
    sending = [
        dist.isend(tensor, group=group, group_dst=ahead, tag=tag) for tag, tensor in enumerate(sent)
    ]
    for tag in (3, 0, 4, 2, 1):
        received = torch.zeros(3)
        dist.recv(received, group=group, group_src=behind, tag=tag)
        assert_same(received, sent[tag])
    for work in sending:
        work.wait()


@check
def messages_under_one_tag_keep_their_order(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    group = collectives.group
    received = [torch.zeros(2) for _ in range(6)]
    works = [dist.irecv(one, group=group, group_src=behind, tag=7) for one in received]
    sent = [torch.full((2,), float(number)) for number in range(6)]
    works += [dist.isend(tensor, group=group, group_dst=ahead, tag=7) for tensor in sent]
    for work in reversed(works):
        work.wait()
    for got, expected in zip(received, sent, strict=True):
        assert_same(got, expected)


@check
def everyone_sends_to_everyone_at_once(collectives: Collectives) -> None:
    rank, group = collectives.rank, collectives.group
    peers = [peer for peer in range(collectives.size) if peer != rank]
    received = {peer: torch.zeros(1000) for peer in peers}
    outgoing = {peer: torch.full((1000,), 10.0 * rank + peer) for peer in peers}
    works = [dist.isend(outgoing[peer], group=group, group_dst=peer) for peer in peers]
    works += [dist.irecv(received[peer], group=group, group_src=peer) for peer in peers]
    for work in works:
        work.wait()
    for peer in peers:
        assert_same(received[peer], torch.full((1000,), 10.0 * peer + rank))


@check
def a_receive_from_any_source(collectives: Collectives) -> None:
    size, rank, group = collectives.size, collectives.rank, collectives.group
    if rank:
        dist.send(torch.full((2,), float(rank)), group=group, group_dst=0)
        return
    sources = []
    for _ in range(size - 1):
        received = torch.zeros(2)
        sources.append(dist.recv(received, group=group))
        assert received.tolist() == [float(sources[-1])] * 2
    assert sorted(sources) == list(range(1, size))


@check
def messages_of_nothing_and_of_a_scalar(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    for sent in (torch.empty(0), torch.tensor(5.0)):
        received = torch.zeros_like(sent)
        work = dist.isend(sent, group=collectives.group, group_dst=ahead)
        dist.recv(received, group=collectives.group, group_src=behind)
        work.wait()
        assert_same(received, sent)


@check
def messages_of_megabytes(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    received, sent = torch.zeros(1_000_003), values(collectives.rank, 1_000_003)
    work = dist.isend(sent, group=collectives.group, group_dst=ahead)
    dist.recv(received, group=collectives.group, group_src=behind)
    work.wait()
    assert_same(received, values(behind, 1_000_003))


@check
def a_message_of_a_view_with_strides(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead, behind = neighbours(collectives)
    sent, received = values(collectives.rank, 6).view(2, 3).t(), torch.zeros(2, 3).t()
    work = dist.isend(sent, group=collectives.group, group_dst=ahead)
    dist.recv(received, group=collectives.group, group_src=behind)
    work.wait()
    assert_same(received, values(behind, 6).view(2, 3).t())


@check
def messages_in_a_batch(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    group = collectives.group
    ahead, behind = neighbours(collectives)
    forward, backward = torch.zeros(3), torch.zeros(4)
    sent = (torch.full((3,), float(collectives.rank)), torch.full((4,), -float(collectives.rank)))
    # With two ranks both neighbours are the same one: messages to it keep their order.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent[0], group=group, group_peer=ahead),
            dist.P2POp(dist.irecv, forward, group=group, group_peer=behind),
            dist.P2POp(dist.isend, sent[1], group=group, group_peer=behind),
            dist.P2POp(dist.irecv, backward, group=group, group_peer=ahead),
        ]
    )
    for work in works:
        work.wait()
    assert_same(forward, torch.full((3,), float(behind)))
    assert_same(backward, torch.full((4,), -float(ahead)))


@check
def messages_pass_collectives_in_flight(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    group = collectives.group
    ahead, behind = neighbours(collectives)
    received, total = torch.zeros(3), torch.ones(4)
    receiving = dist.irecv(received, group=group, group_src=behind)
    reducing = dist.all_reduce(total, group=group, async_op=True)
    dist.isend(torch.full((3,), float(collectives.rank)), group=group, group_dst=ahead).wait()
    reducing.wait()
    receiving.wait()
    assert_same(received, torch.full((3,), float(behind)))
    assert_same(total, torch.full((4,), float(collectives.size)))


@check
def a_barrier_waits_for_everyone(collectives: Collectives) -> None:
    for _ in range(3):
        dist.barrier(group=collectives.group)
    work = dist.barrier(group=collectives.group, async_op=True)
    work.wait()


@check
def a_monitored_barrier(collectives: Collectives) -> None:
    dist.monitored_barrier(group=collectives.group, timeout=timedelta(seconds=20))


@check
def a_monitored_barrier_of_a_gloo_group(collectives: Collectives) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=20), wait_all_ranks=True)
