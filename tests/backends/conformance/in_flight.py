"""Operations in flight: waited for in any order, polled, followed by a future, coalesced."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_shard.backends._c10d import all_gather_flat, reduce_scatter_flat
from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check, check_each
from tests.backends.conformance.tensors import (
    all_values,
    assert_same,
    own_slice,
    sum_of_values,
    values,
)
from tests.patience import patient

_PATIENCE_SECONDS = 20.0


def begin_all_reduce(collectives: Collectives) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin an operation; return its work, what it writes, and what it should."""
    tensor = values(collectives.rank, 10)
    work = dist.all_reduce(tensor, group=collectives.group, async_op=True)
    return work, tensor, sum_of_values(collectives.size, 10)


def begin_reduce_scatter(collectives: Collectives) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin an operation; return its work, what it writes, and what it should."""
    output, numel = torch.zeros(5), 5 * collectives.size
    source = values(collectives.rank, numel)
    work = reduce_scatter_flat(output, source, group=collectives.group, async_op=True)
    return work, output, own_slice(collectives, sum_of_values(collectives.size, numel))


def begin_all_gather(collectives: Collectives) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin an operation; return its work, what it writes, and what it should."""
    output = torch.zeros(5 * collectives.size)
    source = values(collectives.rank, 5)
    work = all_gather_flat(output, source, group=collectives.group, async_op=True)
    return work, output, all_values(collectives.size, 5).view(-1)


def begin_broadcast(collectives: Collectives) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin an operation; return its work, what it writes, and what it should."""
    tensor = values(collectives.rank, 6)
    work = dist.broadcast(tensor, group_src=0, group=collectives.group, async_op=True)
    return work, tensor, values(0, 6)


def begin_all_to_all(collectives: Collectives) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
    """Begin an operation; return its work, what it writes, and what it should."""
    output = torch.zeros(collectives.size)
    source = torch.full((collectives.size,), float(collectives.rank))
    work = dist.all_to_all_single(output, source, group=collectives.group, async_op=True)
    return work, output, torch.arange(float(collectives.size))


Begin = Callable[[Collectives], tuple[dist.Work, torch.Tensor, torch.Tensor]]
BEGIN: dict[str, Begin] = {
    "all_reduce": begin_all_reduce,
    "reduce_scatter": begin_reduce_scatter,
    "all_gather": begin_all_gather,
    "broadcast": begin_broadcast,
    "all_to_all": begin_all_to_all,
}


@check_each(BEGIN)
def waiting_for(collectives: Collectives, operation: str) -> None:
    work, got, expected = BEGIN[operation](collectives)
    work.wait()
    assert_same(got, expected)


@check_each(BEGIN)
def polling(collectives: Collectives, operation: str) -> None:
    work, got, expected = BEGIN[operation](collectives)
    work.wait()
    assert work.is_completed(), "not completed after it was waited for"
    work, got, expected = BEGIN[operation](collectives)
    deadline = time.monotonic() + patient(_PATIENCE_SECONDS)
    while not work.is_completed():
        assert time.monotonic() < deadline, "never completed"
    work.wait()
    assert_same(got, expected)


@check_each(BEGIN)
def the_future_of(collectives: Collectives, operation: str) -> None:
    work, got, expected = BEGIN[operation](collectives)
    followed = work.get_future().then(lambda future: future.value() is not None)
    assert followed.wait()
    assert_same(got, expected)


@check
def works_end_in_any_order(collectives: Collectives) -> None:
    for shift in range(len(BEGIN)):
        started = [begin(collectives) for begin in BEGIN.values()]
        # Each rank waits in an order of its own.
        shift_here = (shift + collectives.rank) % len(started)
        for work, got, expected in started[shift_here:] + started[:shift_here]:
            work.wait()
            assert_same(got, expected)


@check
def many_works_in_flight(collectives: Collectives) -> None:
    tensors = [torch.full((50,), float(number)) for number in range(40)]
    works = [dist.all_reduce(one, group=collectives.group, async_op=True) for one in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        assert_same(tensor, torch.full((50,), float(number * collectives.size)))


@contextmanager
def coalescing() -> Iterator[dist.ProcessGroup]:
    """Coalesce what is begun inside, on a group of its own: one that cannot stays in that state."""
    group = dist.new_group()
    with c10d._coalescing_manager(group, torch.get_default_device(), async_ops=True) as manager:
        yield group
    manager.wait()


@check
def coalesced_all_reduces(collectives: Collectives) -> None:
    tensors = [values(collectives.rank + number, 6) for number in range(3)]
    with coalescing() as group:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    for number, tensor in enumerate(tensors):
        expected = [values(rank + number, 6) for rank in range(collectives.size)]
        assert_same(tensor, torch.stack(expected).sum(0))


@check
def coalesced_all_gathers(collectives: Collectives) -> None:
    outputs = [torch.zeros(4 * collectives.size) for _ in range(3)]
    with coalescing() as group:
        for number, output in enumerate(outputs):
            all_gather_flat(output, values(collectives.rank + number, 4), group=group)
    for number, output in enumerate(outputs):
        expected = [values(rank + number, 4) for rank in range(collectives.size)]
        assert_same(output, torch.cat(expected))


@check
def coalesced_reduce_scatters(collectives: Collectives) -> None:
    outputs = [torch.zeros(2) for _ in range(3)]
    with coalescing() as group:
        for output in outputs:
            reduce_scatter_flat(output, values(collectives.rank, 2 * collectives.size), group=group)
    expected = own_slice(collectives, sum_of_values(collectives.size, 2 * collectives.size))
    for output in outputs:
        assert_same(output, expected)
