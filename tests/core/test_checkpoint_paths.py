"""What Lightning is made to find behind fsspec; what of it has to be there for that."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import pytorch_lightning as other_root
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_shard.core.checkpoint_paths import _newest_last, _newest_requeued


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/found", recursive=True)


@pytest.mark.parametrize("root", [pl, other_root])
def test_the_look_ups_of_lightning_are_there(root: Any) -> None:
    trainer = root.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    connector = trainer._checkpoint_connector
    assert connector._parse_ckpt_path.__wrapped__.__module__.startswith(root.__name__)
    found = type(connector)._hpc_resume_path.fget
    assert found.__module__ == "lightning_shard.core.checkpoint_paths"
    assert connector._hpc_resume_path is None


def trainer_with(*callbacks: Any, root: str = ".") -> Any:
    return SimpleNamespace(callbacks=list(callbacks), loggers=[], default_root_dir=root)


def test_the_newest_that_is_complete_is_the_last(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/found/last.ckpt/.metadata", b"one")
    memory.pipe("/found/last-v1.ckpt", b"a file")
    memory.pipe("/found/last-v2.ckpt/__0_0.distcp", b"half")
    memory.pipe("/found/step=4.ckpt", b"another")
    trainer = trainer_with(ModelCheckpoint("memory://found"))
    assert _newest_last(trainer) == "memory://found/last-v1.ckpt"
    memory.pipe("/found/last.ckpt/.metadata", b"two")
    assert _newest_last(trainer) == "memory://found/last.ckpt"
    memory.pipe("/found/on_exception.ckpt", b"on an exception")
    trainer.callbacks.append(OnExceptionCheckpoint("memory://found"))
    assert _newest_last(trainer) == "memory://found/on_exception.ckpt"
    Path(tmp_path, "last.ckpt").write_text("local, and later")
    os.utime(tmp_path / "last.ckpt", (4e9, 4e9))
    trainer.callbacks.append(ModelCheckpoint(tmp_path))
    assert _newest_last(trainer) == str(tmp_path / "last.ckpt")
    assert _newest_last(trainer_with(ModelCheckpoint(tmp_path))) is None  # Lightning finds it


def test_the_requeued_job_goes_on_from_what_is_complete(memory: Any) -> None:
    assert _newest_requeued("memory://found") is None
    memory.pipe("/found/hpc_ckpt_9.ckpt", b"nine")
    memory.pipe("/found/hpc_ckpt_10.ckpt/.metadata", b"ten")
    memory.pipe("/found/hpc_ckpt_11.ckpt/__0_0.distcp", b"half")
    memory.pipe("/found/other-hpc_ckpt_12.ckpt", b"of others")
    assert _newest_requeued("memory://found") == "memory://found/hpc_ckpt_10.ckpt"
