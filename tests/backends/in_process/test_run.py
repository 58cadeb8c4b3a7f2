"""Processes that ranks fork."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

from lightning_shard.testing import run_ranks


class Ends:
    """Garbage in a cycle, which notes the process in which it ends."""

    def __init__(self, notes: Path) -> None:
        self.itself, self.notes = self, notes

    def __del__(self) -> None:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Dataset[int]):
    """Collects garbage wherever it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return os.getpid()


@pytest.mark.slow
def test_a_forked_worker_leaves_what_its_parent_has_left(tmp_path: Path) -> None:
    """A forked worker ended what its parent had left."""
    notes = tmp_path / "ended_in"

    def read(rank: int) -> int:
        Ends(notes)
        loader = DataLoader(Collecting(), num_workers=1, multiprocessing_context="fork")
        return int(next(iter(loader)))

    gc.collect()
    gc.disable()
    try:
        workers = run_ranks(read, 2)
    finally:
        gc.enable()
    assert os.getpid() not in workers
    gc.collect()
    assert notes.read_text().split() == [str(os.getpid())] * 2


remembered_operations: Callable[[], tuple[int, int]] = (
    torch._C._get_DTensor_sharding_propagator_cache_stats
)


def add_dtensors(folder: Path) -> None:
    """Add DTensors of a Gloo group that has ended when this returns; torch remembers its mesh."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert (sharded + sharded).to_local().tolist() == [2.0] * 4
    finally:
        dist.destroy_process_group()


def test_a_forked_worker_does_not_wait_for_a_group_of_another_thread(
    tmp_path: Path,
) -> None:
    """A forked worker waited for a group that torch remembered for another thread."""
    before = sum(remembered_operations())
    add_dtensors(tmp_path)
    assert sum(remembered_operations()) > before
    assert run_ranks(lambda rank: sum(remembered_operations()), 2) == [0, 0]
