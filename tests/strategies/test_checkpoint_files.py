"""Files of checkpoints: a failure is the same error on every rank; a user's plugin is used."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

import lightning_shard
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring(
    "Checkpoint directory",
    "The '.*_dataloader' does not have many workers",
    "Be aware that when using `ckpt_path`",
)


class Plain:
    """An object among the hyperparameters."""


class WithObject(BoringModel):
    def __init__(self, plain: Plain | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def trainer(folder: Path, strategy: Any = "zero3_in_process", **options: Any) -> L.Trainer:
    options = {"max_steps": 2, "devices": 2} | options
    return cpu_trainer(strategy=strategy, limit_val_batches=0, default_root_dir=folder, **options)


class SavesAndCatches(Callback):
    """Saves where that fails, and once more where it does not."""

    told: dict[int, str]  # by rank; each has a copy of the callback

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        try:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/file/last.ckpt")
        except CheckpointError as error:
            self.told[trainer.global_rank] = str(error)
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3", "local_sgd"])
def test_a_failed_save_is_the_same_error_on_every_rank(tmp_path: Path, strategy: str) -> None:
    """A failed save was an error on rank 0 only."""
    (tmp_path / "file").write_text("")
    told = SavesAndCatches.told = {}
    trainer(tmp_path, f"{strategy}_in_process", callbacks=[SavesAndCatches()]).fit(BoringModel())
    assert len(told) == 2
    assert len(set(told.values())) == 1
    assert "On rank 0: " in told[1]
    assert "file/last.ckpt was not saved: File exists (EEXIST)" in told[1]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1.ckpt", "2.ckpt", "file"]


@pytest.mark.parametrize("strategy", ["zero3_in_process", "elastic_in_process"])
def test_a_fit_ends_with_the_error_of_its_save(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "file").write_text("")
    saver = ModelCheckpoint(tmp_path / "file" / "below", every_n_train_steps=1)
    with pytest.raises(CheckpointError, match="was not saved: Not a directory"):
        trainer(tmp_path, strategy, callbacks=[saver], enable_checkpointing=True).fit(BoringModel())


def test_a_file_that_cannot_be_loaded_ends_a_fit_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last.ckpt is empty"):
        trainer(tmp_path).fit(BoringModel(), ckpt_path=path)
    with pytest.raises(FileNotFoundError, match=r"gone.ckpt"):
        trainer(tmp_path).fit(BoringModel(), ckpt_path=tmp_path / "gone.ckpt")


def test_objects_load_where_lightnings_argument_says_so(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    saving = trainer(tmp_path)
    saving.fit(WithObject(Plain()))
    saving.save_checkpoint(path)
    trainer(tmp_path).fit(WithObject(Plain()), ckpt_path=path, weights_only=False)
    with pytest.raises(CheckpointError, match=r"holds objects of .*\.Plain, and weights_only=True"):
        trainer(tmp_path).fit(WithObject(Plain()), ckpt_path=path, weights_only=True)
    assert isinstance(
        WithObject.load_from_checkpoint(path, weights_only=False).hparams["plain"], Plain
    )


class Counting(TorchCheckpointIO):
    saved = 0

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        type(self).saved += 1
        super().save_checkpoint(*args, **kwargs)


def test_a_plugin_of_the_users_own_writes(tmp_path: Path) -> None:
    one = trainer(tmp_path, plugins=[Counting()])
    one.fit(BoringModel())
    one.save_checkpoint(tmp_path / "last.ckpt")
    assert Counting.saved == 1
    given = lightning_shard.ZeRO3Strategy(backend="in_process", checkpoint_io=Counting())
    assert isinstance(given.checkpoint_io, Counting)


def test_a_plugin_that_wraps_another_wraps_ours() -> None:
    given = lightning_shard.ZeRO3Strategy(backend="in_process")
    assert isinstance(given.checkpoint_io, CheckpointFiles)
    given.checkpoint_io = AsyncCheckpointIO()
    assert isinstance(given.checkpoint_io.checkpoint_io, CheckpointFiles)
    given.checkpoint_io = AsyncCheckpointIO(Counting())
    assert isinstance(given.checkpoint_io.checkpoint_io, Counting)


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.fit(BoringModel())
    one.save_checkpoint(tmp_path / "last.ckpt")
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert loaded["state_dict"].keys() == BoringModel().state_dict().keys()
    with pytest.raises(TypeError, match="storage_options"):
        one.save_checkpoint(tmp_path / "other.ckpt", storage_options={})
