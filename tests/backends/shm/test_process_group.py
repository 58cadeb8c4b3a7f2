"""Ranks on shared memory: who disagrees, leaves or dies is named, and nothing is left of it."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.backends.calls import Call
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.shm import heap, room
from lightning_shard.core.call_site import find_call_site
from lightning_shard.errors import CollectiveMismatchError, RankFailedError, ShardError
from tests.processes import REPOSITORY, rank_and_world_size, run_processes


def join(*, timeout: float = 20, debug: bool = False) -> Collectives:
    rank, size = rank_and_world_size()
    backend = get_backend("shm").with_debug(debug)
    backend.init_process_group(
        rank=rank, world_size=size, device=torch.device("cpu"), timeout=timedelta(seconds=timeout)
    )
    assert dist.group.WORLD is not None
    return backend.collectives(dist.group.WORLD)


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except ShardError as error:
        return type(error).__name__, str(error)
    return "", ""


# --- what is read in place ----------------------------------------------------------------------


def read_in_place() -> list[bool]:
    collectives = join()
    rank, size, like = collectives.rank, collectives.size, torch.empty(0)
    found = []
    for numel in (24, 3 * 50_000):
        full = collectives.new_empty(like, numel).copy_(torch.arange(numel) * (rank + 1.0))
        before = heap.own_heap().used_bytes
        total = torch.arange(numel) * sum(range(1, size + 1))
        own = full.view(size, -1)[rank]
        collectives.reduce_scatter(own, full, "sum").wait()
        found.append(torch.equal(own, total.view(size, -1)[rank].float()))
        collectives.all_gather(full, own).wait()
        found.append(torch.equal(full, total.float()))
        found.append(heap.own_heap().used_bytes <= before)  # nothing was copied there
    collectives.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_buffers_of_the_backend_are_read_in_place() -> None:
    assert run_processes(read_in_place, 3) == [[True] * 6] * 3


def overwrite_at_once() -> list[float]:
    """Write a tensor again as soon as its operation is over; a peer may still be late."""
    collectives = join()
    like, sums = torch.empty(0), []
    full = collectives.new_empty(like, 2 * 300_000)
    part = torch.empty(300_000)
    for step in range(30):
        full.fill_(float(step))
        if collectives.rank == step % 2:
            time.sleep(0.002)
        collectives.reduce_scatter(part, full, "sum").wait()
        full.fill_(-1.0)
        sums.append(float(part.min()) + float(part.max()))
    dist.destroy_process_group()
    return sums


def test_nobody_reads_what_is_written_after_the_operation() -> None:
    expected = [4.0 * step for step in range(30)]
    assert run_processes(overwrite_at_once, 2) == [expected] * 2


def many_in_flight() -> list[bool]:
    collectives = join()
    rank = collectives.rank
    tensors = [torch.full((70_000,), float(rank + number)) for number in range(400)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works) if rank else works:
        work.wait()
    sums = [torch.equal(one, torch.full_like(one, 2 * k + 1)) for k, one in enumerate(tensors)]
    dist.destroy_process_group()
    return [all(sums)]


def test_more_in_flight_than_the_boards_have_rounds() -> None:
    assert run_processes(many_in_flight, 2) == [[True]] * 2


def many_unread_messages() -> bool:
    collectives = join()
    numbers, right = range(300), True
    if collectives.rank == 0:
        works = [dist.isend(torch.full((5,), float(n)), dst=1, tag=n) for n in numbers]
        for work in works:
            work.wait()
    else:
        for number in reversed(numbers):  # the last is asked for first
            got = torch.zeros(5)
            dist.recv(got, src=0, tag=number)
            right = right and bool((got == number).all())
    dist.destroy_process_group()
    return right


def test_more_messages_than_a_board_has_room_for() -> None:
    assert run_processes(many_unread_messages, 2) == [True, True]


def train_under_ddp() -> list[float]:
    collectives = join()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), bucket_cap_mb=0.02
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    data = torch.randn(6, 8, 64).chunk(collectives.size, dim=1)[collectives.rank]
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    dist.destroy_process_group()
    return sums


def test_torch_ddp_trains_as_one_process() -> None:
    (alone,) = run_processes(train_under_ddp, 1)
    for sums in run_processes(train_under_ddp, 2):
        assert sums == pytest.approx(alone, rel=1e-5)


# --- who disagrees, leaves or dies --------------------------------------------------------------


def disagree(debug: bool) -> tuple[str, str]:
    collectives = join(debug=debug)
    tensor = torch.ones(4)
    wrong = {0: lambda: dist.all_reduce(tensor), 1: lambda: dist.broadcast(tensor, src=0)}
    found = error_of(wrong[collectives.rank])
    dist.destroy_process_group()
    return found


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("debug", [False, True])
def test_ranks_that_disagree_are_told(debug: bool) -> None:
    for kind, message in run_processes(disagree, 2, debug=debug):
        assert kind == CollectiveMismatchError.__name__
        assert "all_reduce" in message
        assert "broadcast" in message


def give_too_little() -> tuple[str, str]:
    collectives = join()
    rank = collectives.rank
    inputs = [torch.ones(2), torch.ones(3 if rank == 0 else 2)]
    outputs = [torch.zeros(2), torch.zeros(2)]
    found = error_of(lambda: dist.all_to_all(outputs, inputs))
    dist.destroy_process_group()
    return found


def test_parts_of_another_size_are_not_read() -> None:
    kind, message = run_processes(give_too_little, 2)[1]
    assert kind == CollectiveMismatchError.__name__
    assert "rank 0 gives 3 elements" in message


def leave_early() -> tuple[str, str]:
    collectives = join()
    if collectives.rank == 1:
        dist.destroy_process_group()
        return "", ""
    return error_of(lambda: collectives.all_reduce(torch.ones(3)).wait())


def test_a_rank_that_leaves_early_is_named() -> None:
    kind, message = run_processes(leave_early, 2)[0]
    assert kind == RankFailedError.__name__
    assert "rank 1 has ended without it" in message


def die() -> tuple[str, str]:
    collectives = join()
    full = collectives.new_empty(torch.empty(0), 1 << 20)
    if collectives.rank == 1:
        os._exit(0)
    return error_of(lambda: [collectives.all_reduce(full).wait() for _ in range(3)])


def test_a_rank_that_dies_is_named() -> None:
    kind, message = run_processes(die, 2, vanishing_ranks=[1])[0]
    assert kind == RankFailedError.__name__
    assert "rank 1" in message


def wait_for_nobody() -> tuple[str, str]:
    collectives = join(timeout=2)
    found = "", ""
    if collectives.rank == 0:
        found = error_of(lambda: collectives.all_reduce(torch.ones(3)).wait())
    else:
        time.sleep(4)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_after_the_time_out() -> None:
    assert run_processes(wait_for_nobody, 2)[0][0] == RankFailedError.__name__


# --- where it cannot run ------------------------------------------------------------------------


def run_out_of_memory() -> str:
    collectives = join()
    full = OSError(28, "No space left on device")
    with patch.object(heap.os, "posix_fallocate", side_effect=full):
        _, message = error_of(lambda: collectives.new_empty(torch.empty(0), 100 << 20))
    collectives.barrier()
    dist.destroy_process_group()
    return message


def test_a_full_host_is_an_error_and_no_signal() -> None:
    for message in run_processes(run_out_of_memory, 2):
        assert "got no 419430400 bytes of shared memory" in message
        assert "fewer ranks" in message


# --- what is left -------------------------------------------------------------------------------


def be_killed(folder: str, by: int = signal.SIGKILL, at: int = 20, all_ranks: bool = False) -> None:
    collectives = join()
    full = collectives.new_empty(torch.empty(0), 2 << 20).zero_()
    inode = os.fstat(heap.own_heap().fd).st_ino
    Path(folder, str(collectives.rank)).write_text(json.dumps([os.getpid(), inode]))
    for number in range(1_000_000):
        collectives.reduce_scatter(full[: 1 << 20], full, "sum").wait()
        if number == at and (collectives.rank == 1 or all_ranks):
            os.kill(os.getpid(), by)


def inodes_in_use() -> set[int]:
    """The files without names that processes of this host have open or mapped."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        found |= {int(line.split()[4]) for line in lines if "/memfd:lightning_shard" in line}
    return found


def test_nothing_is_left_of_killed_ranks() -> None:
    before = {one.name for one in Path("/dev/shm").iterdir()}
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(AssertionError, match="ended with -9"):
            run_processes(be_killed, 2, folder=folder)
        told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    assert not {inode for _, inode in told} & inodes_in_use()
    after = {one.name for one in Path("/dev/shm").iterdir()}
    assert not {name for name in after - before if "lightning_shard" in name}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_of_a_hundred_killed_fits() -> None:
    signals = signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS
    chance, inodes = random.Random(0), set()
    before = {one.name for one in Path("/dev/shm").iterdir()}
    for number in range(100):
        how = {"by": signals[number % 5], "at": chance.randrange(60), "all_ranks": number % 7 == 0}
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(AssertionError, match="ended with"):
                run_processes(be_killed, 2, folder=folder, **how)
            told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
        inodes |= {inode for _, inode in told}
    assert not inodes & inodes_in_use()
    after = {one.name for one in Path("/dev/shm").iterdir()}
    assert not {name for name in after - before if "lightning_shard" in name}


def sum_up() -> float:
    collectives = join()
    full = collectives.new_empty(torch.empty(0), 4 << 20).fill_(1.0)
    collectives.all_reduce(full).wait()
    dist.destroy_process_group()
    return float(full.max())


FULL = "mount -t tmpfs -o size=64k full /dev/shm && ! head -c 1M /dev/zero > /dev/shm/filler"


@pytest.mark.hosts  # needs root
def test_a_full_folder_of_shared_memory_is_not_needed_and_nothing_is_left_there() -> None:
    code = (
        "import os; from tests.backends.shm.test_process_group import sum_up; "
        "from tests.processes import run_processes; "
        "print(run_processes(sum_up, 2, fresh=True), os.listdir('/dev/shm'))"
    )
    shell = f'{FULL} 2>/dev/null && exec {sys.executable} -c "{code}"'
    command = ["unshare", "--mount", "sh", "-c", shell]
    token = {"LIGHTNING_SHARD_JOB_TOKEN": "the key of this user has no room there"}
    run = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | token, capture_output=True, text=True, check=False
    )
    assert run.stdout.split("\n")[0] == "[2.0, 2.0] ['filler']", run.stderr


def test_copies_that_all_have_read_go_whatever_was_posted_before_them() -> None:
    alone = room.Room(heap.own_heap(), dist.HashStore(), 0, 1)
    offers = [torch.ones(1 << 19) for _ in range(2)]
    before = heap.own_heap().used_bytes
    for number, tensor in zip((4, 2), offers, strict=True):
        call = Call("barrier", 0, [tensor], [], (), find_call_site(), [])
        alone.post(number, call, alone.offer([tensor], [tensor]))
    assert heap.own_heap().used_bytes >= before + (4 << 20)
    alone.own.read = 3
    assert alone.may_post(5, 0)
    assert heap.own_heap().used_bytes < before + (4 << 20)


def test_no_more_is_staged_than_the_limit() -> None:
    assert run_processes(stage_much, 2) == [True, True]


def stage_much() -> bool:
    with patch.object(room, "STAGED_LIMIT_BYTES", 4 << 20):
        join()
        tensors = [torch.ones(1 << 19) for _ in range(12)]  # 2 MiB each
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        used = heap.own_heap().used_bytes
        for work in works:
            work.wait()
        right = all(bool((tensor == 2).all()) for tensor in tensors)
        dist.destroy_process_group()
    return right and used < 8 << 20
