"""Whoever is killed in the middle of a save leaves the checkpoint before it, and nothing else."""

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.files.parts import is_leftover
from lightning_shard.checkpoint.files.reading import read_file
from tests.checkpoint.files.killed import main, save

SHM = Path("/dev/shm")


def killed_while_saving(folder: Path, seconds: float) -> int:
    """Kill a process that saves, and return the number of the last save that it has told."""
    told, tells = os.pipe()
    with warnings.catch_warnings():  # Python 3.12 warns of threads, of which the child needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()  # quick to begin: torch is there
    if process == 0:
        os.dup2(tells, 1)
        try:
            main(folder)
        finally:
            os._exit(1)
    os.close(tells)
    with os.fdopen(told) as output:
        try:
            assert output.readline() == "0\n"
            time.sleep(seconds)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        return int(["0", *output.read().split()][-1])


def check(folder: Path, last: int) -> bool:
    """Check both checkpoints; return whether the killed process has left something behind."""
    loaded = read_file(folder / "last.ckpt", weights_only=True)
    (number,) = {float(value) for tensor in loaded.values() for value in tensor.unique()}
    assert number in (last, last + 1, last + 2)
    sharded = folder / "sharded.ckpt"
    shards = [torch.load(one) for one in sorted(sharded.glob("*.distcp"))]
    assert len(shards) == 4
    (of_shards,) = {float(value) for shard in shards for value in shard.unique()}
    assert of_shards == float((sharded / ".metadata").read_text())
    assert of_shards in (last, last + 1)
    return any(is_leftover(one) for one in folder.iterdir())


def kill(folder: Path, times: int, seed: int) -> int:
    rng, num_left = random.Random(seed), 0
    for _ in range(times):
        num_left += check(folder, killed_while_saving(folder, rng.uniform(0, 0.05)))
        save(folder, 0)
        assert sorted(one.name for one in folder.iterdir()) == ["last.ckpt", "sharded.ckpt"]
    return num_left


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    kill(tmp_path, times=4, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_fifty_killed_saves_lose_nothing(where: str, tmp_path: Path) -> None:
    if where == "disk":
        assert kill(tmp_path, times=50, seed=1) > 0
        return
    if not os.access(SHM, os.W_OK):
        pytest.skip(f"{SHM} is not there to write to")
    folder = SHM / f"lightning_shard_{os.getpid()}"
    folder.mkdir()
    try:
        assert kill(folder, times=50, seed=2) > 0
    finally:
        for one in sorted(folder.rglob("*"), reverse=True):
            one.rmdir() if one.is_dir() else one.unlink()
        folder.rmdir()
