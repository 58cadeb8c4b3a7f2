"""A mapping keeps this process's writes to itself, and knows which pages it has of its own."""

import gc
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.backends.shm import copy_on_write
from lightning_shard.backends.shm.copy_on_write import CopyOnWrite, works_here
from lightning_shard.backends.shm.heap import PAGE_BYTES

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
@settings(max_examples=60, deadline=None)
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
    with patch.object(copy_on_write, "_page_map", side_effect=PermissionError):
        assert not works_here()
    works_here.cache_clear()
    assert works_here()
