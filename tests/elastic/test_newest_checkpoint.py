"""Which file an elastic fit goes back to: the newest one that is whole."""

import os
from pathlib import Path

import lightning as L  # noqa: N812
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_shard
from lightning_shard.checkpoint.files.parts import part_of
from lightning_shard.elastic._lightning import newest_checkpoint
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from tests.checkpoint.files.archives import checkpoint


def test_a_file_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    trainer = L.Trainer(
        strategy=lightning_shard.ElasticStrategy(backend="in_process", num_ranks=2),
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(tmp_path)],
    )
    names = ["whole", "flipped", "cut_off", "empty"]
    paths = [tmp_path / f"{name}.ckpt" for name in names]
    for path in [*paths, part_of(tmp_path / "last.ckpt")]:
        CheckpointFiles().save_checkpoint(checkpoint(), path)
    content = bytearray(paths[0].read_bytes())
    weight = checkpoint()["state_dict"]["0.weight"].numpy().tobytes()
    content[content.index(weight) + 5] ^= 1
    paths[1].write_bytes(content)
    paths[2].write_bytes(content[: len(content) // 2])
    paths[3].write_bytes(b"")
    for number, path in enumerate(paths):
        os.utime(path, (1000 + number, 1000 + number))
    with pytest.warns(UserWarning, match="cannot be read and is passed over: CheckpointError"):
        assert newest_checkpoint(trainer, since=0) == str(paths[0])
