"""A rank's collectives are noted, and given out again to that rank alone; ranks of this process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends._c10d import all_gather_flat, reduce_scatter_flat
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError
from lightning_shard.replay.replay import RecordedBackend, group_of_one
from lightning_shard.replay.tape import CallTape, Result, ResultRecorder
from lightning_shard.testing import run_ranks

RANKS, RANK = 3, 1
Program = Callable[[int, type[Collectives]], list[Any]]


def _numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def many_calls(rank: int, kind: type[Collectives]) -> list[Any]:
    """Call what strategies call, waited for in another order than begun; return what came."""
    own = _numbers(rank, 6)
    summed, most, parts = own.clone(), own.clone(), own.new_empty(3 * 6)
    slices = [own.new_empty(6) for _ in range(RANKS)]
    first = dist.all_reduce(summed, async_op=True)
    second = dist.all_reduce(most, op=ReduceOp.MAX, async_op=True)
    second.wait()
    first.wait()
    all_gather_flat(parts, own)
    dist.all_gather(slices, own)
    scattered, turned, sent = own.new_empty(2), own.new_empty(6), own.clone()
    reduce_scatter_flat(scattered, own)
    dist.all_to_all_single(turned, own)
    dist.broadcast(sent, src=2)
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(own, group=pair)
    ours = kind(dist.group.WORLD)  # type: ignore[arg-type]
    mean = _numbers(rank, 7)
    ours.all_reduce(mean, op="avg").wait()
    told = ours.all_gather_object(f"rank {rank}")
    return [summed, most, parts, *slices, scattered, turned, sent, objects, own, mean, told]


def _noted(rank: int, program: Program, kind: type[Collectives]) -> tuple[list[Any], list[Result]]:
    recorder = ResultRecorder()
    if rank != RANK:  # the patches are of the process: one rank makes them
        dist.barrier()
        found = program(rank, kind)
        dist.barrier()
        return found, []
    with recorder.noting(lambda: True):
        with recorder.paused():
            dist.barrier()
        found = program(rank, kind)
    dist.barrier()
    return found, recorder.results


def _same(got: Any, expected: Any) -> bool:
    return torch.equal(got, expected) if isinstance(expected, Tensor) else got == expected


@pytest.mark.parametrize("recorded", ["nccl", "gloo"])
def test_one_rank_alone_gets_what_it_got_among_others(recorded: str) -> None:
    kind = ExchangeCollectives if recorded == "gloo" else Collectives
    expected, results = run_ranks(lambda rank: _noted(rank, many_calls, kind), RANKS)[RANK]
    tape = CallTape(rank=RANK, results=[Result(**vars(one)) for one in results], is_playing=True)
    with group_of_one(tape, RANKS):
        got = many_calls(RANK, RecordedBackend(recorded).collectives)  # type: ignore[arg-type]
    assert len(got) == len(expected)
    assert all(_same(*pair) for pair in zip(got, expected, strict=True))
    assert not dist.is_initialized()


def test_before_and_after_a_tape_peers_are_copies_of_the_rank() -> None:
    def same_on_all(rank: int, kind: type[Collectives]) -> list[Any]:
        return _without_senders(kind, rank)

    expected = run_ranks(lambda rank: same_on_all(rank, Collectives), RANKS)[RANK]
    with group_of_one(CallTape(rank=RANK, results=[]), RANKS):
        for recorded in ("nccl", "gloo"):
            kind: Any = RecordedBackend(recorded).collectives
            got = _without_senders(kind, RANK)
            assert all(_same(*pair) for pair in zip(got, expected, strict=True))


def _without_senders(kind: Any, rank: int) -> list[Any]:
    own = _numbers(7, 6)
    summed, most, parts, scattered = own.clone(), own.clone(), own.new_empty(18), own.new_empty(2)
    slices = [own.new_empty(6) for _ in range(RANKS)]
    listed, is_any = own.new_empty(2), torch.tensor([True, False])
    dist.all_reduce(summed)
    dist.all_reduce(most, op=ReduceOp.MAX)
    dist.all_reduce(is_any)
    all_gather_flat(parts, own)
    dist.all_gather(slices, own)
    reduce_scatter_flat(scattered, own)
    dist.reduce_scatter(listed, list(own.view(3, 2)))
    ours = kind(dist.group.WORLD)
    mean, gathered = own.clone(), own.new_empty(18)
    ours.all_reduce(mean, op="avg").wait()
    ours.all_gather(gathered, own).wait()
    objects = ours.all_gather_object("one")
    told = ours.broadcast_object("two", src=2)
    return [summed, most, is_any, parts, *slices, scattered, listed, mean, gathered, objects, told]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], r"calls all_reduce \[\(4,\)\] as operation 0, expected no more as recorded"),
        ([Result(operation="recv")], "expected recv .* as recorded: the step goes another way"),
        ([Result(operation="all_reduce", tensors=[torch.ones(3)])], r"expected all_reduce \[\(3,"),
    ],
)
def test_calls_of_another_step_are_refused(results: list[Result], message: str) -> None:
    tape = CallTape(rank=RANK, results=results, is_playing=True)
    with group_of_one(tape, RANKS), pytest.raises(CheckpointError, match=message):
        dist.all_reduce(torch.ones(4))


def test_a_call_that_had_no_result_raises_that_a_peer_has_failed() -> None:
    tape = CallTape(rank=RANK, results=[Result(operation="all_reduce")], is_playing=True)
    with group_of_one(tape, RANKS):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(RankFailedError, match="Rank 1: all_reduce, operation 0 of the record"):
            work.wait()


def test_a_group_that_stands_already_is_refused() -> None:
    with (
        group_of_one(CallTape(rank=0, results=[]), 2),
        pytest.raises(ConfigError, match="one stands already"),
        group_of_one(CallTape(rank=0, results=[]), 2),
    ):
        pass


def test_calls_of_other_threads_and_of_pauses_are_not_noted() -> None:
    recorder = ResultRecorder()
    is_on = [True]

    def call() -> None:
        dist.all_reduce(torch.ones(1))

    with group_of_one(CallTape(rank=0, results=[]), 2), recorder.noting(lambda: is_on[0]):
        call()
        other = threading.Thread(target=call)
        other.start()
        other.join()
        with recorder.paused():
            call()
        is_on[0] = False
        call()
    assert [one.operation for one in recorder.results] == ["all_reduce"]
    recorder.clear()
    assert recorder.results == []


def test_calls_of_a_backward_pass_in_another_thread_are_noted() -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            summed = grad.clone()
            dist.all_reduce(summed)
            return summed

    def backward() -> None:
        Summed.apply(torch.ones(2, requires_grad=True)).sum().backward()

    recorder = ResultRecorder()
    with group_of_one(CallTape(rank=0, results=[]), 2), recorder.noting(lambda: True):
        other = threading.Thread(target=backward)  # as autograd's own thread of a GPU
        other.start()
        other.join()
    assert [one.operation for one in recorder.results] == ["all_reduce"]
