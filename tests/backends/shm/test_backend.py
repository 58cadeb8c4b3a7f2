"""Ranks have a buffer in common: each sees its own edits, its own pages, and what all gave."""

import errno
import gc
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_shard.backends.collectives import Collectives, CommonBuffer, begin_update
from lightning_shard.backends.shm import backend
from lightning_shard.backends.shm.backend import CopyOnWrite, works_here
from lightning_shard.backends.shm.heap import PAGE_BYTES
from lightning_shard.errors import BackendUnavailableError
from tests.backends.shm.test_process_group import join
from tests.processes import run_processes

NUMEL, SPLIT = 5000, 1900  # a page has elements of both ranks


def shared(ranks: Collectives) -> tuple[CommonBuffer, slice]:
    part = slice(0, SPLIT) if ranks.rank == 0 else slice(SPLIT, NUMEL)
    made = ranks.share(torch.arange(NUMEL, dtype=torch.float32), part.start, part.stop)
    assert made is not None
    return made, part


def content(buffer: CommonBuffer) -> list[Tensor]:
    """What each part is filled with."""
    return [buffer.tensor[:SPLIT].unique().tolist(), buffer.tensor[SPLIT:].unique().tolist()]


def update(buffer: CommonBuffer, part: slice, value: float, *, in_place: bool) -> None:
    """Write a rank's part, where it shows itself or where all see it."""
    begin_update([buffer], in_place=in_place)
    if in_place:
        buffer.tensor[part] = value
    else:
        buffer.part.fill_(value)
    buffer.gather().wait()


def edit(*, debug: bool = False, in_place: bool = True) -> dict[str, Any]:
    ranks = join(debug=debug)
    buffer, part = shared(ranks)
    seen: dict[str, Any] = {"first": torch.equal(buffer.tensor, torch.arange(float(NUMEL)))}
    buffer.tensor.fill_(10 + ranks.rank)
    ranks.barrier()
    seen["edited"] = content(buffer)
    buffer.gather().wait()
    seen["gathered"] = content(buffer)
    update(buffer, part, 20 + ranks.rank, in_place=in_place)
    seen["updated"] = content(buffer)
    if ranks.rank == 1:
        buffer.tensor.fill_(30)
    buffer.gather().wait()
    seen["edited by one"] = content(buffer)
    buffer.tensor.add_(5 + ranks.rank)
    begin_update([buffer], in_place=in_place)
    own = buffer.tensor[part] if in_place else buffer.part
    seen["edited before the update"] = own.unique().tolist()
    own.add_(1)
    buffer.gather().wait()
    seen["and updated"] = content(buffer)
    return seen


@pytest.mark.parametrize(("debug", "in_place"), [(False, True), (True, True), (False, False)])
def test_each_rank_sees_its_edits_until_all_gather(debug: bool, in_place: bool) -> None:
    first, second = run_processes(edit, 2, debug=debug, in_place=in_place)
    assert first.pop("edited before the update") == [25]
    assert second.pop("edited before the update") == [36]
    assert first.pop("edited") == [[10], [10]]
    assert second.pop("edited") == [[11], [11]]
    assert first == second
    assert first == {
        "first": True,
        "gathered": [[10], [11]],
        "updated": [[20], [21]],
        "edited by one": [[20], [30]],
        "and updated": [[26], [37]],
    }


def leave(*, in_place: bool) -> dict[str, Any]:
    ranks = join()
    buffer, part = shared(ranks)
    buffer.tensor.fill_(1)
    buffer.gather().wait()
    left = buffer.tensor
    if ranks.rank == 0:
        buffer.leave()
    for number in (2, 3):
        update(buffer, part, number, in_place=in_place)
    return {"left": left.unique().tolist(), "content": content(buffer)}


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_that_a_rank_has_left_stays_and_the_rank_goes_on(in_place: bool) -> None:
    first, second = run_processes(leave, 2, in_place=in_place)
    assert first == {"left": [1], "content": [[3], [3]]}
    assert second == {"left": [3], "content": [[3], [3]]}


def update_beside_a_reader(*, in_place: bool) -> list[bool]:
    """Rank 1 reads for a while before each update, which rank 0 begins at once."""
    ranks = join()
    buffer, part = shared(ranks)
    buffer.tensor.fill_(0)
    buffer.gather().wait()
    was_still = []
    for number in range(20):
        if ranks.rank == 1:
            was_still.append(all(bool((buffer.tensor == number).all()) for _ in range(50)))
        update(buffer, part, number + 1, in_place=in_place)
    return was_still


@pytest.mark.parametrize("in_place", [True, False])
def test_nobody_writes_while_a_peer_may_still_read(in_place: bool) -> None:
    assert run_processes(update_beside_a_reader, 2, in_place=in_place)[1] == [True] * 20


def many_in_flight() -> bool:
    ranks = join()
    buffers = [shared(ranks)[0] for _ in range(5)]
    for number, buffer in enumerate(buffers):
        if ranks.rank == number % 2:
            buffer.tensor.fill_(number)
    handles = [buffer.gather() for buffer in buffers]
    for handle in handles if ranks.rank else reversed(handles):
        handle.wait()
    own = [content(buffer)[number % 2] for number, buffer in enumerate(buffers)]
    return own == [[float(number)] for number in range(5)]


def test_several_are_waited_for_in_any_order() -> None:
    assert run_processes(many_in_flight, 2) == [True, True]


def without_memory() -> str:
    ranks = join()
    with patch.object(backend, "_make", side_effect=OSError(errno.ENOMEM, "no memory")):
        try:
            shared(ranks)
        except BackendUnavailableError as error:
            return str(error)
    return ""


def test_every_rank_is_told_that_the_host_has_no_memory() -> None:
    for told in run_processes(without_memory, 2):
        assert "got no 20480 bytes of shared memory" in told
        assert "pass backend='gloo'" in told


def where_one_cannot() -> bool:
    ranks = join()
    if ranks.rank == 1:
        backend.works_here.cache_clear()
        with patch.object(backend, "_page_map", side_effect=PermissionError):
            return ranks.share(torch.zeros(NUMEL), SPLIT, NUMEL) is None
    return ranks.share(torch.zeros(NUMEL), 0, SPLIT) is None


def test_nothing_is_shared_where_one_rank_cannot() -> None:
    assert run_processes(where_one_cannot, 2) == [True, True]


def open_files() -> int:
    ranks = join()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        shared(ranks)
    return len(os.listdir("/proc/self/fd")) - before


def test_files_are_closed_with_their_buffers() -> None:
    assert max(run_processes(open_files, 2)) <= 1


NUM_PAGES = 6
SIZE = NUM_PAGES * PAGE_BYTES


def mapped(num_bytes: int = SIZE) -> CopyOnWrite:
    file = os.memfd_create("test")
    os.posix_fallocate(file, 0, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return CopyOnWrite(file, num_bytes)


@pytest.fixture
def memory() -> CopyOnWrite:
    return mapped()


def test_a_write_is_the_process_s_own(memory: CopyOnWrite) -> None:
    memory.common.fill_(1)
    memory.own[PAGE_BYTES] = 7
    memory.common[PAGE_BYTES + 1] = 9
    assert memory.common[PAGE_BYTES] == 1
    assert memory.own[PAGE_BYTES : PAGE_BYTES + 2].tolist() == [7, 1]
    memory.forget_edits(0, memory.own.numel())
    assert memory.own[PAGE_BYTES : PAGE_BYTES + 2].tolist() == [1, 9]


def test_what_is_read_is_no_edit_and_what_is_written_is(memory: CopyOnWrite) -> None:
    assert int(memory.own.sum()) == 0
    assert not memory.has_edits(0, SIZE)
    memory.own[3 * PAGE_BYTES + 5] = 0  # the same value
    found = [memory.has_edits(n * PAGE_BYTES, (n + 1) * PAGE_BYTES) for n in range(NUM_PAGES)]
    assert found == [False, False, False, True, False, False]


def test_pages_that_are_open_are_written_for_all_and_the_others_are_not(
    memory: CopyOnWrite,
) -> None:
    memory.open(PAGE_BYTES + 10, 2 * PAGE_BYTES + 10)
    memory.own.fill_(5)
    assert memory.common[::PAGE_BYTES].tolist() == [0, 5, 5, 0, 0, 0]
    memory.close(PAGE_BYTES + 10, 2 * PAGE_BYTES + 10)
    memory.own.fill_(6)
    assert memory.common[::PAGE_BYTES].tolist() == [0, 5, 5, 0, 0, 0]


def test_no_bytes_are_no_edits_and_open_nothing(memory: CopyOnWrite) -> None:
    memory.own[0] = 1
    memory.open(5, 5)
    assert memory.own[0] == 1
    assert not memory.has_edits(5, 5)


def test_separate_memory_no_longer_follows_the_file(memory: CopyOnWrite) -> None:
    memory.common.fill_(1)
    memory.separate()
    memory.common.fill_(2)
    assert memory.own.unique().tolist() == [1]


def test_a_forked_child_edits_alone_and_leaves_the_parent_s_memory(memory: CopyOnWrite) -> None:
    memory.own[0] = 1
    child = os.fork()
    if child == 0:
        memory.own.fill_(9)
        del memory
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(memory.own.sum()) == 1


def test_memory_and_file_go_with_the_last_tensor() -> None:
    gc.collect()  # what tests before have left may hold files
    before = len(os.listdir("/proc/self/fd"))
    memory = mapped(64 << 20)
    view = memory.own[5:].view(torch.uint8)
    memory.common.fill_(3)
    del memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert view[-1] == 3
    del view
    gc.collect()
    assert "memfd:test" not in Path("/proc/self/maps").read_text()


@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 3 * PAGE_BYTES)), max_size=4),
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted),
)
@settings(max_examples=60)
def test_edits_are_found_by_the_page(writes: list[tuple[int, int]], asked: list[int]) -> None:
    memory = mapped()
    written = set[int]()
    for start, count in writes:
        memory.own[start : start + count] = 1
        stop = min(start + count, SIZE)
        written.update(range(start // PAGE_BYTES, (stop - 1) // PAGE_BYTES + 1))
    start, stop = asked
    expected = (
        {*range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))} & written if start < stop else set()
    )
    assert memory.has_edits(start, stop) == bool(expected)


def test_a_system_that_hides_its_page_map_is_found_out() -> None:
    works_here.cache_clear()
    with patch.object(backend, "_page_map", side_effect=PermissionError):
        assert not works_here()
    works_here.cache_clear()
    assert works_here()
