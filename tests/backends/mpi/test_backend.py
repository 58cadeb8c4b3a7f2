"""What an MPI group does beyond the suite that every backend passes, under a real mpirun."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightning_shard.backends.mpi import backend as mpi_backend
from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.backend import BACKEND_NAME, INIT_METHOD, MPIGroup
from lightning_shard.backends.registry import get_backend
from lightning_shard.errors import CollectiveMismatchError, ConfigError, RankFailedError
from tests.mpirun import run_mpi

pytestmark = pytest.mark.mpi
CHECKS: dict[str, Callable[[int], None]] = {}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    """Run `function(rank)` on both ranks as a test of its name."""
    CHECKS[function.__name__] = function
    return function


def run_checks() -> dict[str, str]:
    """Join by c10d's own means, and run every check; map the failed ones to what they raised."""
    dist.init_process_group(BACKEND_NAME, init_method=INIT_METHOD, timeout=timedelta(seconds=30))
    failed = {}
    for name, function in CHECKS.items():
        try:
            function(dist.get_rank())
        except (Exception, pytest.fail.Exception):
            failed[name] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    return failed


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """What failed on each of two ranks."""
    failed: list[dict[str, str]] = run_mpi(run_checks, 2)
    return failed


def as_mpi_group(group: dist.ProcessGroup | None) -> MPIGroup:
    assert isinstance(group, MPIGroup)
    return group


@contextmanager
def everything_staged() -> Iterator[None]:
    """Carry every operation out on copies, as for GPU tensors that MPI cannot reach."""
    original = mpi_backend.must_stage
    mpi_backend.must_stage = lambda tensors: True
    try:
        yield
    finally:
        mpi_backend.must_stage = original


@check
def copies_on_the_host_stand_in_for_gpu_tensors(rank: int) -> None:
    with everything_staged():
        total = torch.tensor([rank + 1.0, 2.0])
        dist.all_reduce(total)
        gathered = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank)))
        told = torch.tensor(rank)
        dist.broadcast(told, src=1)
        if rank == 0:
            dist.send(torch.ones(3), dst=1)
        else:
            received = torch.zeros(3)
            dist.recv(received, src=0)
            assert received.tolist() == [1.0] * 3
    assert total.tolist() == [3.0, 4.0]
    assert [one.tolist() for one in gathered] == [[0.0, 0.0], [1.0, 1.0]]
    assert told.item() == 1


@check
def a_transfer_goes_on_while_its_rank_is_busy_elsewhere(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    many = torch.full((4 << 20,), float(rank))
    if rank == 0:
        work = dist.isend(many, dst=1)
        store.wait(["received"], timedelta(seconds=20))  # calls nothing of MPI
        assert work is not None
        work.wait()
    else:
        dist.recv(many, src=0)
        store.set("received", "yes")
        assert many[-1].item() == 0.0


@check
def a_future_ends_without_anybody_waiting(rank: int) -> None:
    tensor = torch.full((200_000,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    results: list[Tensor] = work.get_future().wait()
    assert results[0][0].item() == 1.0


@check
def large_sums_may_be_waited_for_in_different_orders(rank: int) -> None:
    tensors = [torch.full((100_000 + i,), float(rank + i)) for i in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works if rank else works[::-1]:
        assert work is not None
        work.wait()
    assert [tensor[-1].item() for tensor in tensors] == [1.0 + 2 * i for i in range(6)]


@check
def a_large_sum_reaches_the_root_only(rank: int) -> None:
    tensor = torch.full((300_001,), float(rank + 1))
    dist.reduce(tensor, dst=1)
    assert tensor.unique().tolist() == [3.0 if rank else 1.0]


@check
def a_message_longer_than_its_room_is_a_mismatch(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(5), dst=1, tag=3)
        return
    with pytest.raises(CollectiveMismatchError, match=r"Rank 1: a peer gave more elements to recv"):
        dist.recv(torch.zeros(2), src=0, tag=3)


@check
def a_message_shorter_than_its_room_is_a_mismatch(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(2), dst=1, tag=3)
        return
    with pytest.raises(CollectiveMismatchError, match=r"recv.* got 8 bytes, expected 20"):
        dist.recv(torch.zeros(5), src=0, tag=3)


@check
def coalesced_operations_keep_their_order_beside_others(rank: int) -> None:
    group = as_mpi_group(dist.group.WORLD)
    shards = [torch.zeros(50_000) for _ in range(3)]
    copies = [torch.zeros(2) for _ in range(3)]
    gathered = torch.zeros(100_000)
    begins: list[Callable[[], dist.Work]] = [
        lambda: group.reduce_scatter_single_coalesced(
            shards, [torch.full((100_000,), float(rank + number)) for number in range(3)]
        ),
        lambda: group.all_gather_single_coalesced(copies, [torch.tensor([float(rank)])] * 3),
        lambda: group.all_gather_single(gathered, torch.full((50_000,), 10.0 + rank)),
    ]
    works = []
    for begin in begins:
        works.append(begin())
        if rank:  # rank 0 goes ahead and begins the next ones
            works[-1].wait()
    for work in works:
        work.wait()
    assert [shard.unique().tolist() for shard in shards] == [[1.0], [3.0], [5.0]]
    assert [copy.tolist() for copy in copies] == [[0.0, 1.0]] * 3
    assert gathered.view(2, -1)[:, 0].tolist() == [10.0, 11.0]


@check
def coalesced_sums_of_two_dtypes_are_not_rounded_to_one(rank: int) -> None:
    halves, large = torch.full((3,), 1.5), torch.full((2,), 2**40 + 1)
    with c10d._coalescing_manager():
        dist.all_reduce(halves)
        dist.all_reduce(large)
    assert halves.tolist() == [3.0] * 3
    assert large.tolist() == [2**41 + 2] * 2


@check
def a_rank_outside_the_group_is_refused(rank: int) -> None:
    group = as_mpi_group(dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"broadcast got rank 2 of the group, expected .* 2 rank"):
        dist.broadcast(torch.zeros(1), group_src=2)
    with pytest.raises(ConfigError, match=r"send got rank 1 .* tag -5, .* not negative"):
        group.send([torch.zeros(1)], 1, -5)


@check
def what_follows_a_future_runs_as_the_users_own_code(rank: int) -> None:
    work = dist.all_reduce(torch.full((200_000,), float(rank)), async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert not doubled.wait().is_inference()


@check
def a_group_can_be_made_while_a_peer_waits_for_a_sum(rank: int) -> None:
    many = torch.full((200_000,), float(rank))
    work = dist.all_reduce(many, async_op=True)
    assert work is not None
    if rank:  # its second step needs rank 0, which is making the group
        dist.distributed_c10d._get_default_store().wait(["making a group"])
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().set("making a group", "yes")
    group = dist.new_group([0, 1])
    work.wait()
    assert many[-1].item() == 1.0
    dist.destroy_process_group(group)


@check
def a_future_ends_in_time_when_a_peer_does_not_come(rank: int) -> None:
    pair = as_mpi_group(dist.new_group([0, 1]))
    pair.set_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["the future has ended"])
        return
    work = dist.all_reduce(torch.ones(2), group=pair, async_op=True)
    assert work is not None
    with pytest.raises(RankFailedError, match="has waited for the group's time-out"):
        work.get_future().wait()
    assert work.is_completed()
    store.set("the future has ended", "yes")


@check
def a_peer_that_does_not_come_is_an_error_in_time(rank: int) -> None:
    pair = as_mpi_group(dist.new_group([0, 1]))
    pair.set_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RankFailedError, match=r"all_reduce\(SUM, float32 \(2,\)\).*\n?.*"):
            dist.all_reduce(torch.ones(2), group=pair)
        dist.distributed_c10d._get_default_store().set("gave up", "yes")
    else:
        dist.distributed_c10d._get_default_store().wait(["gave up"])


@check
def a_wait_may_be_shorter_than_the_groups(rank: int) -> None:
    if rank == 0:
        received = torch.zeros(1)
        work = dist.irecv(received, src=1, tag=9)
        assert work is not None
        with pytest.raises(TimeoutError, match="recv"):
            work.wait(timedelta(milliseconds=20))
        dist.distributed_c10d._get_default_store().set("waited", "yes")
        work.wait()
        assert received.item() == 4.0
    else:
        dist.distributed_c10d._get_default_store().wait(["waited"])
        dist.send(torch.tensor([4.0]), dst=0, tag=9)


@check
def room_that_does_not_fit_the_own_part_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"Rank {rank} of the group, all_gather"):
        dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(3))


@check
def a_tag_beyond_the_librarys_is_refused(rank: int) -> None:
    group = as_mpi_group(dist.group.WORLD)
    assert group.lane(7) == (group.comm, 7)
    assert group.lane((1 << 30) + 7)[0] is group.inner
    group._largest_tag = 100
    try:
        with pytest.raises(ConfigError, match="got the tag 101, expected one up to 100"):
            dist.send(torch.zeros(1), dst=1 - rank, tag=101)
    finally:
        group._largest_tag = runtime.largest_tag()


@check
def a_rank_other_than_mpis_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"as rank {rank} of 2"):
        next(dist.rendezvous(INIT_METHOD, 1 - rank, 2))


@check
def a_group_is_given_back_with_its_communicators(rank: int) -> None:
    for _ in range(50):
        group = dist.new_group([1, 0])
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1.0
        dist.destroy_process_group(group)


@pytest.mark.parametrize("name", CHECKS)
def test_mpi_group(name: str, failures: list[dict[str, str]]) -> None:
    for rank, failed in enumerate(failures):
        assert name not in failed, f"rank {rank}:\n{failed[name]}"


def raise_on(rank: int) -> None:
    dist.init_process_group(BACKEND_NAME, init_method=INIT_METHOD, timeout=timedelta(seconds=60))
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    time.sleep(60)


@pytest.mark.slow
def test_a_rank_that_raises_does_not_wait_for_its_peers_at_exit() -> None:
    with pytest.raises(AssertionError, match="ValueError: on purpose") as caught:
        run_mpi(raise_on, 2, rank=1, timeout_seconds=50)
    assert "ended with -9" not in str(caught.value)  # no time ran out


def call_different_operations() -> str:
    backend = get_backend("mpi").with_debug(True)
    cpu = torch.device("cpu")
    world = runtime.mpi().COMM_WORLD
    backend.init_process_group(
        rank=world.rank, world_size=world.size, device=cpu, timeout=timedelta(seconds=30)
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(tensor) if world.rank == 0 else dist.broadcast(tensor, src=0)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.slow
def test_with_debug_different_operations_are_a_mismatch_on_both_ranks() -> None:
    for message in run_mpi(call_different_operations, 2):
        assert "all_reduce(SUM, float32 (3,))" in message
        assert "broadcast(float32 (3,), root 0)" in message
        assert message.count("test_backend.py:") >= 2
