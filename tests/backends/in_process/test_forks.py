"""Processes that ranks fork."""

import gc
import os
from pathlib import Path

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


def test_a_forked_worker_ended_what_its_parent_had_left(tmp_path: Path) -> None:
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
