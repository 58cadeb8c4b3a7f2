"""ModelCheckpoint beside a save in flight: links, names, and one write for two names."""

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.checkpoint.background_saves import SaveInFlight, UnfinishedFolder
from tests.checkpoint.saved_sections import is_sharded_folder
from tests.checkpoint.sharded.runs import NUM_STEPS, fit
from tests.checkpoint.test_async_saves import made, sharded
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice(
    "Be aware that when using `ckpt_path`", "You're resuming from a checkpoint that ended before"
)


def test_the_last_has_the_files_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, joined = [], []
    write_boxes, join = UnfinishedFolder.write_boxes, SaveInFlight.join

    def writing(self: UnfinishedFolder) -> Any:
        written.append(self._rank)
        return write_boxes(self)

    def joining(self: SaveInFlight, *args: Any) -> bool:
        joined.append(join(self, *args))
        return joined[-1]

    monkeypatch.setattr(UnfinishedFolder, "write_boxes", writing)
    monkeypatch.setattr(SaveInFlight, "join", joining)
    writer = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert sorted(written) == [0, 0, 1, 1]
    assert joined == [True] * 4
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "last.ckpt" / name).samefile(tmp_path / "step=4.ckpt" / name)
    again = fit(sharded("zero2-2"), made(), ckpt_path=tmp_path / "last.ckpt", max_steps=5)
    assert len(again.losses) == 1


def test_a_link_points_to_what_is_complete(tmp_path: Path) -> None:
    points = []

    class Noting(ModelCheckpoint):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero and os.path.islink(tmp_path / "last.ckpt"):
                points.append(is_sharded_folder(tmp_path / "last.ckpt"))

    writer = Noting(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert points
    assert all(points)
    assert os.readlink(tmp_path / "last.ckpt") == f"step={NUM_STEPS}.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]


def test_names_count_what_is_in_flight(tmp_path: Path) -> None:
    writers: Any = [
        ModelCheckpoint(tmp_path, "same", every_n_train_steps=2, save_top_k=1, monitor=monitor)
        for monitor in (None, "step")
    ]
    fit(sharded("zero2-2"), made(), callbacks=writers, enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path)) == ["same-v1.ckpt", "same.ckpt"]
