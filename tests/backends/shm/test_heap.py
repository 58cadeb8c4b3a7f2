"""The heap gives memory, takes it back, says when there is none, and wakes who sleeps."""

import errno
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.backends.shm import heap as heaps
from lightning_shard.backends.shm.heap import PAGE_BYTES, Doorbell, Heap
from lightning_shard.data_parallel.gradients.gradient_buffer import KeptViews
from lightning_shard.data_parallel.memory.flat_memory import FlatMemory
from lightning_shard.errors import BackendUnavailableError
from tests.patience import patient

MEGABYTES = 1 << 20


@pytest.fixture
def heap() -> Iterator[Heap]:
    made = Heap(1 << 30)
    yield made
    os.close(made.fd)


def taken_bytes(heap: Heap) -> int:
    """What the system has given to the heap."""
    return os.fstat(heap.fd).st_blocks * 512


def test_a_tensor_lies_where_the_heap_says(heap: Heap) -> None:
    tensor = heap.empty(1000, torch.float32).fill_(3.0)
    offset = heap.offset_of(tensor[10:])
    assert offset is not None
    there = torch.frombuffer(heap.memory, dtype=torch.float32, count=990, offset=offset)
    assert there.tolist() == [3.0] * 990
    assert heap.offset_of(torch.ones(3)) is None


def test_memory_comes_back_with_the_last_view(heap: Heap) -> None:
    tensor = heap.empty(1000, torch.float32)
    view, address = tensor[5:], tensor.data_ptr()
    del tensor
    gc.collect()
    other = heap.empty(1000, torch.float32)
    assert other.data_ptr() != address
    del view
    gc.collect()
    assert heap.empty(1000, torch.float32).data_ptr() == address


def test_memory_beyond_what_stays_idle_goes_back_to_the_system(heap: Heap) -> None:
    tensors = [heap.empty(40 * MEGABYTES, torch.uint8) for _ in range(4)]
    assert taken_bytes(heap) >= 160 * MEGABYTES
    tensors.clear()
    gc.collect()
    assert heap.used_bytes == 0
    assert taken_bytes(heap) <= heaps.IDLE_LIMIT_BYTES + 2 * PAGE_BYTES


@given(st.lists(st.integers(1, 3 * MEGABYTES), max_size=12), st.randoms())
@settings(max_examples=30)
def test_tensors_never_overlap(sizes: list[int], random: object) -> None:
    heap = Heap(1 << 28)
    with patch.object(heaps, "IDLE_LIMIT_BYTES", 2 * MEGABYTES):
        held: list[torch.Tensor] = []
        for number, size in enumerate(sizes):
            held.append(heap.empty(size, torch.uint8).fill_(number))
            if number % 3 == 2:
                held.pop(random.randrange(len(held)))  # type: ignore[attr-defined]
        assert all(len(set(tensor.tolist()[:: 64 << 10])) == 1 for tensor in held)
        spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    held.clear()
    os.close(heap.fd)


def test_a_host_without_memory_is_an_error_that_says_so(heap: Heap) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        patch.object(heaps.os, "posix_fallocate", side_effect=full),
        pytest.raises(
            BackendUnavailableError, match=r"got no 8388608 bytes of shared memory.*No space left"
        ),
    ):
        heap.empty(8 * MEGABYTES, torch.uint8)
    assert heap.empty(8 * MEGABYTES, torch.uint8).fill_(1).sum() > 0  # the range is there again


def test_memory_that_the_host_has_not_is_not_taken(heap: Heap) -> None:
    """Taking it would have the system end a process, perhaps this one."""
    with (
        patch.object(heaps, "free_host_bytes", return_value=5 * MEGABYTES),
        pytest.raises(BackendUnavailableError, match="the host has 5242880 bytes left"),
    ):
        heap.empty(8 * MEGABYTES, torch.uint8)
    assert taken_bytes(heap) < MEGABYTES


def test_more_than_the_addresses_is_an_error_that_says_so(heap: Heap) -> None:
    with pytest.raises(BackendUnavailableError, match="no range of"):
        heap.empty(2 << 30, torch.uint8)


def test_a_forked_child_gives_nothing_back(heap: Heap) -> None:
    """A DataLoader's worker ends with copies of all tensors, whose memory is the parent's."""
    with patch.object(heaps, "IDLE_LIMIT_BYTES", 0):
        tensors = [heap.empty(1000, torch.float32).fill_(7.0)]
        child = os.fork()
        if child == 0:
            tensors.clear()
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert tensors[0].tolist() == [7.0] * 1000


def test_idle_memory_serves_smaller_tensors_and_larger_ones_once_it_touches(heap: Heap) -> None:
    tensors = [heap.empty(8 * MEGABYTES, torch.uint8) for _ in range(2)]
    address = tensors[0].data_ptr()
    tensors.clear()
    gc.collect()
    assert heap.idle_bytes == 16 * MEGABYTES
    whole = heap.empty(16 * MEGABYTES, torch.uint8)
    assert whole.data_ptr() == address
    del whole
    gc.collect()
    halves = [heap.empty(4 * MEGABYTES, torch.uint8) for _ in range(4)]
    assert heap.idle_bytes == 0
    places = sorted(one.data_ptr() for one in halves)
    assert places == [address + n * 4 * MEGABYTES for n in range(4)]


def test_only_what_is_beyond_the_limit_goes_back(heap: Heap) -> None:
    tensors = [heap.empty(30 * MEGABYTES, torch.uint8) for _ in range(3)]
    tensors.clear()
    gc.collect()
    assert heap.idle_bytes == heaps.IDLE_LIMIT_BYTES
    assert taken_bytes(heap) <= heaps.IDLE_LIMIT_BYTES + 2 * MEGABYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=30))
@settings(max_examples=40)
def test_tensors_never_overlap_whatever_was_given_back(orders: list[tuple[bool, int]]) -> None:
    made = Heap(1 << 30)
    kept: list[torch.Tensor] = []
    with patch.object(heaps, "IDLE_LIMIT_BYTES", 24 * PAGE_BYTES):
        for takes, size in orders:
            if takes or not kept:
                kept.append(made.empty(size * PAGE_BYTES, torch.uint8).fill_(len(kept)))
            else:
                kept.pop(size % len(kept))
            spans = sorted((one.data_ptr(), one.numel()) for one in kept)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
            used = sum(one.numel() for one in kept)
            assert made.used_bytes == used
            assert made.idle_bytes <= 24 * PAGE_BYTES
    os.close(made.fd)


# --- what an owner sets aside -------------------------------------------------------------------


class Owner:
    """Has one tensor, until the heap asks for its memory."""

    def __init__(self, heap: Heap, megabytes: int) -> None:
        self.tensor: torch.Tensor | None = heap.empty(megabytes * MEGABYTES, torch.uint8)
        self.address = self.tensor.data_ptr()
        self._heap = heap

    def set_aside(self) -> None:
        assert self.tensor is not None
        assert self._heap.set_aside(self.tensor, self.let_go)

    def let_go(self) -> None:
        self.tensor = None


def test_who_needs_memory_takes_what_was_set_aside_first(heap: Heap) -> None:
    first, second = Owner(heap, 4), Owner(heap, 4)
    first.set_aside()
    second.set_aside()
    assert heap.idle_bytes == 8 * MEGABYTES
    other = heap.empty(4 * MEGABYTES, torch.uint8)
    assert (first.tensor, other.data_ptr()) == (None, first.address)
    assert second.tensor is not None
    assert heap.idle_bytes == 4 * MEGABYTES
    assert taken_bytes(heap) < 9 * MEGABYTES


def test_idle_memory_goes_before_what_was_set_aside(heap: Heap) -> None:
    owner = Owner(heap, 4)
    heap.empty(4 * MEGABYTES, torch.uint8)  # and is idle again
    owner.set_aside()
    kept = heap.empty(4 * MEGABYTES, torch.uint8)
    assert owner.tensor is not None
    assert kept.data_ptr() != owner.address


def test_what_was_taken_up_stays_its_owner_s(heap: Heap) -> None:
    owner = Owner(heap, 4)
    owner.set_aside()
    assert owner.tensor is not None
    heap.take_up(owner.tensor)
    assert heap.idle_bytes == 0
    other = heap.empty(4 * MEGABYTES, torch.uint8)
    assert owner.tensor is not None
    assert other.data_ptr() != owner.address


def test_what_is_set_aside_counts_to_the_limit(heap: Heap) -> None:
    owners = [Owner(heap, 30) for _ in range(3)]
    for owner in owners:
        owner.set_aside()
    assert [owner.tensor is None for owner in owners] == [True, False, False]
    assert heap.idle_bytes <= heaps.IDLE_LIMIT_BYTES
    assert taken_bytes(heap) <= heaps.IDLE_LIMIT_BYTES + 2 * MEGABYTES


def test_an_owner_that_is_gone_leaves_its_memory_idle_once(heap: Heap) -> None:
    owner = Owner(heap, 4)
    owner.set_aside()
    address = owner.address
    del owner
    gc.collect()
    assert heap.idle_bytes == 4 * MEGABYTES
    assert heap.empty(4 * MEGABYTES, torch.uint8).data_ptr() == address


def test_other_memory_is_not_set_aside_here(heap: Heap) -> None:
    assert not heap.set_aside(torch.ones(3), lambda: None)
    assert heap.idle_bytes == 0


def test_what_is_above_the_limit_is_let_go_at_once_by_who_keeps_its_views(heap: Heap) -> None:
    """It stayed its owner's, and nobody could have it."""

    class Memory(FlatMemory):
        def __init__(self) -> None:
            pass

        def set_aside(self, flat: torch.Tensor, let_go: Callable[[], None]) -> bool:
            return heap.set_aside(flat, let_go)

    kept = [KeptViews(Memory()) for _ in range(2)]
    for one in kept:
        flat = heap.empty(80 * MEGABYTES, torch.uint8)
        one.keep(flat, [flat.view(-1)])
        del flat
    gc.collect()
    assert [one.take() for one in kept] == [None, None]
    assert heap.used_bytes == 0
    assert taken_bytes(heap) <= heaps.IDLE_LIMIT_BYTES + 2 * MEGABYTES


def test_a_ring_wakes_the_sleeper() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    own, peers = Doorbell(memory), Doorbell(memory)
    woken = threading.Event()

    def sleep() -> None:
        word = own.listen()
        asleep.set()
        own.sleep(word, 30.0)
        own.end_sleep()
        woken.set()

    asleep = threading.Event()
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert asleep.wait(patient(10))
    while not woken.is_set():  # it may not yet lie down at the first
        peers.ring()
        time.sleep(0.001)
    thread.join(patient(10))
    assert not thread.is_alive()


def test_a_ring_between_looking_and_sleeping_is_not_missed() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    own, peers = Doorbell(memory), Doorbell(memory)
    word = own.listen()
    peers.ring()
    begin = time.monotonic()
    own.sleep(word, 30.0)
    assert time.monotonic() - begin < 20
    own.end_sleep()


def test_nobody_rings_where_nobody_sleeps() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    doorbell = Doorbell(memory)
    word = doorbell.listen()
    doorbell.end_sleep()
    with patch.object(doorbell, "_futex") as futex:
        doorbell.ring()
    futex.assert_not_called()
    assert doorbell.listen() == word
    doorbell.end_sleep()
