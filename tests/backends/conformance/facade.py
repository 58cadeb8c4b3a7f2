"""What the facade, `Collectives`, must do on every backend."""

from itertools import permutations

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError, LayoutError
from tests.backends.conformance.suite import check
from tests.backends.conformance.tensors import all_values, own_slice, values

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
SLICE_SIZES = (1, 5, 40_000)


@check
def all_reduce_sums(collectives: Collectives) -> None:
    for dtype in DTYPES:
        for numel in SLICE_SIZES:
            tensor = values(collectives.rank, numel, dtype)
            collectives.all_reduce(tensor)
            expected = all_values(collectives.size, numel, dtype).sum(0, dtype=dtype)
            assert torch.equal(tensor, expected)


@check
def all_reduce_finds_extremes(collectives: Collectives) -> None:
    for dtype in DTYPES:
        everything = all_values(collectives.size, 7, dtype)
        largest, smallest = (values(collectives.rank, 7, dtype) for _ in range(2))
        collectives.all_reduce(largest, "max")
        collectives.all_reduce(smallest, "min")
        assert torch.equal(largest, everything.amax(0))
        assert torch.equal(smallest, everything.amin(0))


@check
def all_reduce_keeps_the_shape(collectives: Collectives) -> None:
    scalar = torch.tensor(2.0)
    matrix = torch.ones(2, 3)
    collectives.all_reduce(scalar)
    collectives.all_reduce(matrix, "avg")
    assert scalar.item() == 2.0 * collectives.size
    assert torch.equal(matrix, torch.ones(2, 3))


@check
def all_reduce_of_a_parameter(collectives: Collectives) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(collectives.rank)))
    collectives.all_reduce(parameter, "avg")
    assert torch.equal(parameter.data, torch.full((3,), (collectives.size - 1) / 2))


@check
def average_is_the_sum_divided_once(collectives: Collectives) -> None:
    size = collectives.size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        expected = (all_values(size, 2 * size, dtype).double().sum(0) / size).to(dtype)
        reduced = values(collectives.rank, 2 * size, dtype)
        collectives.all_reduce(reduced, "avg")
        torch.testing.assert_close(reduced, expected)
        output = torch.empty(2, dtype=dtype)
        collectives.reduce_scatter(output, values(collectives.rank, 2 * size, dtype), "avg")
        torch.testing.assert_close(output, own_slice(collectives, expected))


@check
def average_of_halves_sums_in_float32(collectives: Collectives) -> None:
    # 256 + 1 + 1 ... stays 256 in bf16 when each sum is rounded, and 2 * 60000 is beyond fp16.
    size = collectives.size
    value = 256.0 if collectives.rank == 0 else 1.0
    expected = torch.tensor((256.0 + size - 1) / size).to(torch.bfloat16)
    tensor = torch.full((2 * size,), value, dtype=torch.bfloat16)
    output = torch.empty(2, dtype=torch.bfloat16)
    collectives.reduce_scatter(output, tensor, "avg")
    collectives.all_reduce(tensor, "avg")
    assert torch.equal(output, expected.expand(2))
    assert torch.equal(tensor, expected.expand(2 * size))
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    collectives.all_reduce(large, "avg")
    assert torch.equal(large, torch.full((3,), 60000.0, dtype=torch.float16))


@check
def average_of_integers_is_refused(collectives: Collectives) -> None:
    full = torch.ones(collectives.size, dtype=torch.int64)
    with pytest.raises(LayoutError, match=r"Cannot average torch\.int64"):
        collectives.all_reduce(full, "avg")
    with pytest.raises(LayoutError, match=r"Cannot average torch\.int64"):
        collectives.reduce_scatter(torch.ones(1, dtype=torch.int64), full, "avg")


@check
def reduce_scatter_keeps_the_own_slice(collectives: Collectives) -> None:
    for dtype in DTYPES:
        for slice_size in SLICE_SIZES:
            numel = collectives.size * slice_size
            full = values(collectives.rank, numel, dtype)
            output = torch.empty(slice_size, dtype=dtype)
            collectives.reduce_scatter(output, full)
            expected = all_values(collectives.size, numel, dtype).sum(0, dtype=dtype)
            assert torch.equal(output, own_slice(collectives, expected))
            assert torch.equal(full, values(collectives.rank, numel, dtype))


@check
def reduce_scatter_finds_extremes(collectives: Collectives) -> None:
    for dtype in DTYPES:
        everything = all_values(collectives.size, 3 * collectives.size, dtype)
        output = torch.empty(3, dtype=dtype)
        collectives.reduce_scatter(output, everything[collectives.rank], "max")
        assert torch.equal(output, own_slice(collectives, everything.amax(0)))


@check
def reduce_scatter_into_the_input(collectives: Collectives) -> None:
    for dtype in DTYPES:
        for slice_size in SLICE_SIZES:
            numel = collectives.size * slice_size
            full = values(collectives.rank, numel, dtype)
            collectives.reduce_scatter(own_slice(collectives, full), full)
            expected = all_values(collectives.size, numel, dtype).sum(0, dtype=dtype)
            assert torch.equal(own_slice(collectives, full), own_slice(collectives, expected))


@check
def reduce_scatter_of_halves_into_float32(collectives: Collectives) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        value = 2048.0 if collectives.rank == 0 else 0.5  # no half type holds 2048.5
        full = torch.full((3 * collectives.size,), value, dtype=dtype)
        output = torch.empty(3)
        collectives.reduce_scatter(output, full)
        assert torch.equal(output, torch.full((3,), 2048 + 0.5 * (collectives.size - 1)))


@check
def all_gather_orders_by_rank(collectives: Collectives) -> None:
    for dtype in (*DTYPES, torch.bool):
        for slice_size in SLICE_SIZES:
            expected = all_values(collectives.size, slice_size, dtype).view(-1)
            output = torch.zeros_like(expected)
            collectives.all_gather(output, values(collectives.rank, slice_size, dtype))
            assert torch.equal(output, expected)


@check
def all_gather_from_the_output(collectives: Collectives) -> None:
    for slice_size in SLICE_SIZES:
        expected = all_values(collectives.size, slice_size, torch.float32).view(-1)
        output = torch.zeros_like(expected)
        own_slice(collectives, output).copy_(own_slice(collectives, expected))
        collectives.all_gather(output, own_slice(collectives, output))
        assert torch.equal(output, expected)


def slice_sizes(size: int) -> list[int]:
    """Return sizes of slices that differ, of which the first is empty."""
    return [3 * rank + 2 * (rank > 1) for rank in range(size)]


@check
def slices_of_different_sizes(collectives: Collectives) -> None:
    sizes = slice_sizes(collectives.size)
    numel, own = (
        sum(sizes),
        slice(sum(sizes[: collectives.rank]), sum(sizes[: collectives.rank + 1])),
    )
    for dtype in DTYPES:
        expected = all_values(collectives.size, numel, dtype).sum(0, dtype=dtype)
        full = values(collectives.rank, numel, dtype)
        again, output = full.clone(), torch.empty(sizes[collectives.rank], dtype=dtype)
        both = [
            collectives.reduce_scatter(output, full, sizes=sizes, async_op=True),
            collectives.reduce_scatter(again[own], again, sizes=sizes, async_op=True),
        ]
        for pending in reversed(both):
            pending.wait()
        assert torch.equal(output, expected[own])
        assert torch.equal(again[own], expected[own])
        gathered = torch.zeros_like(expected)
        collectives.all_gather(gathered, output, sizes=sizes)
        assert torch.equal(gathered, expected)
        again = torch.zeros_like(expected)
        again[own] = output
        collectives.all_gather(again, again[own], sizes=sizes)
        assert torch.equal(again, expected)


@check
def halves_of_different_sizes_are_averaged_in_float32(collectives: Collectives) -> None:
    sizes = slice_sizes(collectives.size)
    value = 2048.0 if collectives.rank == 0 else 0.5  # no half type holds 2048.5
    output = torch.empty(sizes[collectives.rank])
    full = torch.full((sum(sizes),), value, dtype=torch.bfloat16)
    collectives.reduce_scatter(output, full, "avg", sizes=sizes)
    mean = (2048 + 0.5 * (collectives.size - 1)) / collectives.size
    torch.testing.assert_close(output, torch.full_like(output, mean))


@check
def all_to_all_with_even_splits(collectives: Collectives) -> None:
    size = collectives.size
    output = torch.empty(2 * size, dtype=torch.int64)
    collectives.all_to_all(output, torch.arange(2 * size) + 100 * collectives.rank)
    first = 2 * collectives.rank
    assert output.tolist() == [100 * rank + first + i for rank in range(size) for i in range(2)]


@check
def all_to_all_with_uneven_splits(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    given = list(range(size))  # rank i is sent i elements, by everyone
    output = torch.empty(rank * size)
    collectives.all_to_all(
        output,
        torch.full((sum(given),), float(rank)),
        input_split_sizes=given,
        output_split_sizes=[rank] * size,
    )
    assert output.tolist() == [float(source) for source in range(size) for _ in range(rank)]


@check
def broadcast_from_any_rank(collectives: Collectives) -> None:
    for src in range(collectives.size):
        for dtype in DTYPES:
            tensor = values(collectives.rank, 6, dtype).view(2, 3)
            collectives.broadcast(tensor, src)
            assert torch.equal(tensor, values(src, 6, dtype).view(2, 3))


@check
def messages_go_round(collectives: Collectives) -> None:
    if collectives.size == 1:
        return
    ahead = (collectives.rank + 1) % collectives.size
    behind = (collectives.rank - 1) % collectives.size
    received = torch.empty(2, 2)
    sending = collectives.send(torch.full((2, 2), float(collectives.rank)), ahead, async_op=True)
    collectives.recv(received, behind)
    sending.wait()
    assert torch.equal(received, torch.full((2, 2), float(behind)))


@check
def messages_and_collectives_do_not_mix(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    peers = [peer for peer in range(size) if peer != rank]
    received = {peer: torch.empty(4) for peer in peers}
    full = torch.full((4 * size,), 1.0)
    messages = [collectives.recv(received[peer], peer, 5, async_op=True) for peer in peers]
    sums = [torch.empty(4), torch.empty(4)]
    also = type(collectives)(collectives.group)  # a second object on the same group
    pending = [
        collectives.reduce_scatter(sums[0], full, async_op=True),
        also.reduce_scatter(sums[1], 2 * full, async_op=True),
    ]
    message = torch.full((4,), 100.0 + rank)
    messages += [collectives.send(message, peer, 5, async_op=True) for peer in peers]
    for one in pending[::-1] + messages:
        one.wait()
    assert sums[0].tolist() == [float(size)] * 4
    assert sums[1].tolist() == [2.0 * size] * 4
    assert all(received[peer].tolist() == [100.0 + peer] * 4 for peer in peers)


@check
def objects_travel(collectives: Collectives) -> None:
    gathered = collectives.all_gather_object({"rank": collectives.rank})
    assert gathered == [{"rank": rank} for rank in range(collectives.size)]
    last = collectives.size - 1
    assert collectives.broadcast_object(f"from {collectives.rank}", last) == f"from {last}"


@check
def a_handle_waits_once(collectives: Collectives) -> None:
    tensor = torch.ones(3)
    pending = collectives.all_reduce(tensor, async_op=True)
    assert not pending.done
    pending.wait()
    assert pending.done
    pending.wait()
    assert torch.equal(tensor, torch.full((3,), float(collectives.size)))
    assert collectives.all_reduce(tensor).done


@check
def operations_in_flight_may_end_in_any_order(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    for order in list(permutations(range(4)))[::4]:
        shift = rank % 4  # each rank waits in an order of its own
        fulls = [values(rank, size * n, torch.float32) for n in (1000, 2000)]
        outputs = [torch.empty(n) for n in (1000, 2000)]
        gathered = torch.empty(size * 500)
        reduced = values(rank, 30_000, torch.bfloat16)
        pending = [
            collectives.reduce_scatter(outputs[0], fulls[0], async_op=True),
            collectives.reduce_scatter(outputs[1], fulls[1], "avg", async_op=True),
            collectives.all_gather(gathered, values(rank, 500, torch.float32), async_op=True),
            collectives.all_reduce(reduced, async_op=True),
        ]
        for index in order:
            pending[(index + shift) % 4].wait()
        sums = [all_values(size, size * n, torch.float32).sum(0) for n in (1000, 2000)]
        assert torch.equal(outputs[0], own_slice(collectives, sums[0]))
        torch.testing.assert_close(outputs[1], own_slice(collectives, sums[1]) / size)
        assert torch.equal(gathered, all_values(size, 500, torch.float32).view(-1))
        expected = all_values(size, 30_000, torch.bfloat16).sum(0, dtype=torch.float32)
        assert torch.equal(reduced, expected.to(torch.bfloat16))


@check
def random_sums_are_the_same_every_time(collectives: Collectives) -> None:
    size = collectives.size
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(collectives.rank)
        full = torch.randn(size * 70_000).to(dtype)
        runs = []
        for _ in range(3):
            output = torch.empty(70_000, dtype=dtype)
            collectives.reduce_scatter(output, full)
            reduced = full.clone()
            collectives.all_reduce(reduced)
            runs.append((output, reduced))
        for output, reduced in runs[1:]:
            assert torch.equal(output, runs[0][0])
            assert torch.equal(reduced, runs[0][1])
        everywhere = collectives.all_gather_object(runs[0][1].double().sum().item())
        assert len(set(everywhere)) == 1


@check
def nothing_is_moved_without_elements(collectives: Collectives) -> None:
    empty, also_empty = torch.empty(0), torch.empty(0)
    collectives.all_reduce(empty, "avg")
    collectives.reduce_scatter(also_empty, empty)
    collectives.all_gather(also_empty, empty)
    collectives.broadcast(empty)
    collectives.all_to_all(also_empty, empty)


@check
def traffic_is_counted(collectives: Collectives) -> None:
    size, n = collectives.size, 12 * collectives.size
    traffic = collectives.traffic
    traffic.reset()
    full, local = torch.zeros(n), torch.zeros(12)
    collectives.all_reduce(full)
    collectives.reduce_scatter(local, full, async_op=True).wait()
    collectives.reduce_scatter(local, full)
    collectives.all_gather(full.double(), local.double())
    collectives.broadcast(full)
    collectives.all_to_all(torch.empty(n), full)
    collectives.barrier()
    sizes = slice_sizes(size)
    part, whole = torch.zeros(sizes[collectives.rank]), torch.zeros(sum(sizes))
    collectives.reduce_scatter(part, whole, sizes=sizes)
    collectives.all_gather(whole.double(), part.double(), sizes=sizes)
    share = 12 * (size - 1)
    given, taken = len(whole) - len(part), (size - 1) * len(part)
    counted = {
        name: (one.calls, one.elements, one.bytes) for name, one in traffic.snapshot().items()
    }
    assert counted == {
        "all_reduce": (1, 2 * share, 8 * share),
        "reduce_scatter": (3, 2 * share + given, 8 * share + 4 * given),
        "all_gather": (2, share + taken, 8 * share + 8 * taken),
        "broadcast": (1, n if size > 1 else 0, 4 * n if size > 1 else 0),
        "all_to_all": (1, share, 4 * share),
        "barrier": (1, 0, 0),
    }
    assert traffic.total_bytes == sum(one[2] for one in counted.values())
    assert all(one.seconds > 0 for one in traffic.values())


@check
def misfits_are_refused(collectives: Collectives) -> None:
    size = collectives.size
    flat, local = torch.zeros(size * 2), torch.zeros(2)
    with pytest.raises(LayoutError, match="multiple of"):
        collectives.reduce_scatter(torch.zeros(2), torch.zeros(size * 2 + 1))
    with pytest.raises(LayoutError, match="as sizes="):
        collectives.reduce_scatter(local, flat, sizes=range(1, size + 2))
    with pytest.raises(LayoutError, match="one dimension"):
        collectives.all_gather(flat.view(size, 2), local)
    with pytest.raises(LayoutError, match="expected the same type"):
        collectives.all_gather(flat, local.double())
    with pytest.raises(LayoutError, match="expected the same type"):
        collectives.reduce_scatter(local.double(), flat)
    with pytest.raises(LayoutError, match="contiguous"):
        collectives.all_reduce(torch.zeros(2, 3).t())
    with pytest.raises(LayoutError, match="input_split_sizes"):
        collectives.all_to_all(flat, flat.clone(), input_split_sizes=[1] * (size + 1))
    with pytest.raises(LayoutError, match=f"0 to {size - 1}"):
        collectives.broadcast(flat, size)
    with pytest.raises(LayoutError, match="this rank itself"):
        collectives.send(flat, collectives.rank)
    if size > 1:
        with pytest.raises(ConfigError, match="reserved"):
            collectives.send(flat, (collectives.rank + 1) % size, tag=1 << 30)
    with pytest.raises(ConfigError, match="'product'"):
        collectives.all_reduce(flat, "product")  # type: ignore[arg-type]


@check
def subgroups_count_their_own_ranks(collectives: Collectives) -> None:
    world = dist.get_world_size(collectives.group)
    members = list(range(1, world)) or [0]
    group = dist.new_group(members)
    if collectives.rank in members:
        inner = type(collectives)(group)
        assert (inner.rank, inner.size) == (members.index(collectives.rank), len(members))
        output = torch.empty(2)
        inner.reduce_scatter(output, torch.ones(2 * len(members)))
        assert output.tolist() == [float(len(members))] * 2
        tensor = torch.full((2,), float(inner.rank))
        inner.broadcast(tensor, len(members) - 1)
        assert tensor.tolist() == [len(members) - 1.0] * 2
    else:
        with pytest.raises(ConfigError, match="belongs to"):
            type(collectives)(group)
