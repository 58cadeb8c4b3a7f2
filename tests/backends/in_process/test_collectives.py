"""Every collective of `torch.distributed`, on in-process groups of 1 to 4 ranks."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.testing import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.uint32,
    torch.complex64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
# torch 2.13 renamed these, torch 2.11 has the old names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_every_dtype(num_ranks: int, dtype: torch.dtype) -> None:
    def fn(rank: int) -> None:
        mine = torch.tensor([rank, 1]).to(dtype)
        everyones = [torch.tensor([r, 1]).to(dtype) for r in range(num_ranks)]

        gathered = [torch.zeros(2).to(dtype) for _ in range(num_ranks)]
        dist.all_gather(gathered, mine)
        assert all(torch.equal(a, b) for a, b in zip(gathered, everyones, strict=True))

        flat = torch.zeros(2 * num_ranks).to(dtype)
        all_gather_single(flat, mine)
        assert torch.equal(flat, torch.cat(everyones))

        copied = mine.clone()
        dist.broadcast(copied, src=num_ranks - 1)
        assert torch.equal(copied, everyones[-1])

        exchanged = torch.zeros(num_ranks).to(dtype)
        dist.all_to_all_single(exchanged, torch.full((num_ranks,), rank).to(dtype))
        assert torch.equal(exchanged, torch.arange(num_ranks).to(dtype))

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, [6, 10]),
        (dist.ReduceOp.PRODUCT, [6, 24]),
        (dist.ReduceOp.MIN, [1, 2]),
        (dist.ReduceOp.MAX, [3, 4]),
        (dist.ReduceOp.AVG, [2, 3]),
        (dist.ReduceOp.BAND, [0, 0]),
        (dist.ReduceOp.BOR, [3, 7]),
        (dist.ReduceOp.BXOR, [0, 5]),
    ],
    ids=str,
)
def test_reduce_ops(op: Any, expected: list[int]) -> None:
    def fn(rank: int) -> Tensor:
        tensor = torch.tensor([[1, 2], [2, 4], [3, 3]][rank])
        if op == dist.ReduceOp.SUM:
            tensor[1] = [2, 4, 4][rank]
        if op == dist.ReduceOp.BXOR:
            tensor[1] = [2, 4, 3][rank]
        dist.all_reduce(tensor, op)
        return tensor

    assert [t.tolist() for t in run_ranks(fn, 3)] == [expected] * 3


def test_reduce_writes_the_root_only() -> None:
    def fn(rank: int) -> float:
        tensor = torch.tensor(float(rank + 1))
        dist.reduce(tensor, dst=1)
        return tensor.item()

    assert run_ranks(fn, 3) == [1.0, 6.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduce_scatter_both_ways(dtype: torch.dtype) -> None:
    def fn(rank: int) -> None:
        full = (torch.arange(6) + rank).to(dtype)
        expected = (torch.arange(6) * 3 + 3).to(dtype)[2 * rank : 2 * rank + 2]
        flat, listed = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
        reduce_scatter_single(flat, full)
        dist.reduce_scatter(listed, list(full.split(2)))
        assert torch.equal(flat, expected)
        assert torch.equal(listed, expected)

    run_ranks(fn, 3)


def test_uneven_all_gather_and_reduce_scatter() -> None:
    def fn(rank: int) -> None:
        slots = [torch.zeros(r + 1) for r in range(3)]
        dist.all_gather(slots, torch.full((rank + 1,), float(rank)))
        assert [slot.tolist() for slot in slots] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        mine = torch.zeros(rank + 1)
        dist.reduce_scatter(mine, [torch.full((r + 1,), float(rank)) for r in range(3)])
        assert mine.tolist() == [3.0] * (rank + 1)

    run_ranks(fn, 3)


def test_uneven_all_to_all() -> None:
    def fn(rank: int) -> tuple[list[float], list[list[int]]]:
        # Rank r sends s + 1 rows to rank s.
        rows = torch.full((3, 1), float(rank))
        received = torch.zeros(2 * (rank + 1), 1)
        dist.all_to_all_single(received, rows, [rank + 1] * 2, [1, 2])
        parts = [torch.full((s,), rank) for s in range(2)]
        slots = [torch.zeros(rank, dtype=torch.int64) for _ in range(2)]
        dist.all_to_all(slots, parts)
        return received.flatten().tolist(), [slot.tolist() for slot in slots]

    assert run_ranks(fn, 2) == [([0.0, 1.0], [[], []]), ([0.0, 0.0, 1.0, 1.0], [[0], [1]])]


def test_gather_and_scatter() -> None:
    def fn(rank: int) -> None:
        slots = [torch.zeros(2) for _ in range(3)] if rank == 1 else None
        dist.gather(torch.full((2,), float(rank)), slots, dst=1)
        if slots is not None:
            assert [slot[0].item() for slot in slots] == [0.0, 1.0, 2.0]
        mine = torch.zeros(2)
        parts = [torch.full((2,), float(r)) for r in range(3)] if rank == 2 else None
        dist.scatter(mine, parts, src=2)
        assert mine.tolist() == [float(rank)] * 2

    run_ranks(fn, 3)


def test_zero_sizes_and_non_contiguous_tensors() -> None:
    def fn(rank: int) -> None:
        nothing = torch.zeros(0)
        dist.all_reduce(nothing)
        all_gather_single(torch.zeros(0), nothing)
        reduce_scatter_single(torch.zeros(0), nothing)

        base = torch.full((3, 2), float(rank))
        dist.all_reduce(base.t())
        assert base.tolist() == [[1.0, 1.0]] * 3
        columns = torch.zeros(4, 2)
        dist.broadcast(columns[:, 0], src=0)
        slots = list(columns.unbind(1))
        dist.all_gather(slots, torch.full((4,), float(rank)))
        assert columns.tolist() == [[0.0, 1.0]] * 4

    run_ranks(fn, 2)


def test_sends_and_receives_match_by_peer_and_tag() -> None:
    def fn(rank: int) -> list[float]:
        got = [torch.zeros(1) for _ in range(3)]
        if rank == 0:
            works = [dist.isend(torch.tensor([float(t)]), 1, tag=t) for t in (1, 2)]
            for work in works:
                work.wait()
            dist.send(torch.tensor([9.0]), 1)
        else:
            second = dist.irecv(got[1], 0, tag=2)
            first = dist.irecv(got[0], 0, tag=1)
            first.wait()
            second.wait()
            assert dist.recv(got[2]) == 0
        return [tensor.item() for tensor in got]

    assert run_ranks(fn, 2)[1] == [1.0, 2.0, 9.0]


def test_a_number_is_received_into_a_row_of_one() -> None:
    """As pipelines of torch 2.11 do, and Gloo and NCCL let them."""

    def fn(rank: int) -> list[float]:
        got = torch.zeros(1)
        if rank == 0:
            dist.send(torch.tensor(3.0), 1)
        else:
            dist.recv(got, 0)
        return got.tolist()

    assert run_ranks(fn, 2) == [[0.0], [3.0]]


def test_batched_exchange_in_a_ring() -> None:
    def fn(rank: int) -> float:
        got = torch.zeros(1)
        ops = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % 3),
            dist.P2POp(dist.irecv, got, (rank - 1) % 3),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got.item()

    assert run_ranks(fn, 3) == [2.0, 0.0, 1.0]


def test_async_work_overlaps_and_completes() -> None:
    def fn(rank: int) -> None:
        tensors = [torch.full((2,), float(rank)) for _ in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            assert work is not None
            work.wait()
            assert work.is_completed()
            assert torch.equal(work.get_future().value()[0], torch.full((2,), 3.0))
        assert all(tensor.tolist() == [3.0, 3.0] for tensor in tensors)

    run_ranks(fn, 3)


def test_polling_lets_the_others_run() -> None:
    def fn(rank: int) -> None:
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass

    run_ranks(fn, 3)


def test_objects() -> None:
    def fn(rank: int) -> None:
        everyones: list[Any] = [None] * 3
        dist.all_gather_object(everyones, {"rank": rank, "text": "x" * rank})
        assert everyones == [{"rank": r, "text": "x" * r} for r in range(3)]
        told = [["hello"], 7] if rank == 1 else [None, None]
        dist.broadcast_object_list(told, src=1)
        assert told == [["hello"], 7]

    run_ranks(fn, 3)


def test_sub_groups_have_their_own_ranks_and_order() -> None:
    def fn(rank: int) -> float:
        evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = evens if rank % 2 == 0 else odds
        assert dist.get_rank(mine) == rank // 2
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=mine)
        dist.broadcast(tensor, src=rank % 2 + 2, group=mine)
        dist.destroy_process_group(mine)
        dist.barrier()
        return tensor.item()

    assert run_ranks(fn, 4) == [2.0, 4.0, 2.0, 4.0]


def test_groups_of_other_backends_are_in_process_too() -> None:
    def fn(rank: int) -> None:
        group = dist.new_group(backend="gloo")
        group.monitored_barrier()
        dist.monitored_barrier(group)
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=2)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo")
        assert dist.get_rank() == rank

    run_ranks(fn, 2)


def test_coalescing_managers() -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    def fn(rank: int) -> None:
        tensors = [torch.full((2,), float(rank)) for _ in range(3)]
        with _coalescing_manager(async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()
        outputs = [torch.zeros(1) for _ in range(2)]
        with _coalescing_manager():
            for output in outputs:
                reduce_scatter_single(output, torch.full((2,), float(rank)))
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
            dist.broadcast(tensors[0], src=0)
        works.wait()
        assert [t.tolist() for t in tensors + outputs] == [[1.0, 1.0]] * 3 + [[1.0]] * 2

    run_ranks(fn, 2)


def test_old_and_new_method_names() -> None:
    def fn(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        one, full = torch.full((2,), float(rank)), torch.zeros(4)
        for name in ("_allgather_base", "all_gather_single"):
            getattr(group, name)(full, one).wait()
            assert full.tolist() == [0.0, 0.0, 1.0, 1.0]
        for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            getattr(group, name)([full], [one]).wait()
        for name in ("_reduce_scatter_base", "reduce_scatter_single"):
            part = torch.zeros(2)
            getattr(group, name)(part, full).wait()
            assert part.tolist() == [2.0 * rank] * 2
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            getattr(group, name)([part], [full]).wait()
        for name in ("alltoall_base", "all_to_all_single"):
            getattr(group, name)(full.clone(), full, [], []).wait()
        group.allreduce(one).wait()
        group.broadcast(one, 0).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_gather_into_tensor(full, one)
            dist.reduce_scatter_tensor(one, full)

    run_ranks(fn, 2)


def test_leaves_version_counters_alone() -> None:
    def fn(rank: int) -> int:
        weight = torch.ones(2, requires_grad=True)
        dist.all_reduce(weight)
        dist.broadcast(weight, src=0)
        return int(weight._version)

    assert run_ranks(fn, 2) == [0, 0]


def test_tensors_of_inference_mode() -> None:
    def fn(rank: int) -> float:
        with torch.inference_mode(mode=rank == 0):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return tensor.item()

    assert run_ranks(fn, 2) == [2.0, 2.0]
