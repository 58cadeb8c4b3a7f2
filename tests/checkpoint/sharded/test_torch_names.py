"""The private names and protocols of torch that the sharded format rests on are as they were."""

import inspect
import pickle
from copy import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint import FileSystemWriter, planner_helpers
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor, index_of
from lightning_shard.checkpoint.sharded.folder import read_index
from lightning_shard.checkpoint.sharded.run_state import loads_plainly
from lightning_shard.errors import CheckpointError


def test_boxes_follow_the_protocol_that_torch_asks_for() -> None:
    boxes = BoxedTensor((2,), torch.float32, [])
    assert isinstance(boxes, _Checkpointable)
    asked = inspect.getsource(planner_helpers)
    assert all(name in asked for name in ("__create_write_items__", "__create_chunk_list__"))


def test_an_index_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    metadata = Metadata({"a": BytesStorageMetadata()}, planner_data={"a": ("a",)})
    place = WriteResult(MetadataIndex("a"), 7, _StorageInfo("__0_0.distcp", 3, 7))
    writer = FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(copy(metadata), [[], [place]])
    theirs = pickle.loads((tmp_path / ".metadata").read_bytes())
    ours = pickle.loads(index_of(metadata, [[], [place]], str(tmp_path)))
    assert str(theirs.storage_meta.checkpoint_id) == ours.storage_meta.checkpoint_id
    assert type(theirs.storage_meta.save_id) is type(ours.storage_meta.save_id) is str
    theirs.storage_meta = ours.storage_meta
    assert ours == theirs


def test_modules_have_the_hooks_that_are_looked_for() -> None:
    class Converting(nn.Linear):
        def _load_from_state_dict(self, *args: object) -> None:
            raise NotImplementedError

    for make in (
        lambda part: part.register_load_state_dict_pre_hook(lambda *_: None),
        lambda part: part.register_load_state_dict_post_hook(lambda *_: None),
        lambda part: part.register_state_dict_post_hook(lambda *_: None),
    ):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert loads_plainly(model)
        make(model[0])
        assert not loads_plainly(model)
    assert not loads_plainly(nn.Sequential(Converting(2, 2)))
    assert not loads_plainly(nn.LazyLinear(2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_index_is_read_without_running_what_it_holds(tmp_path: Path) -> None:
    dcp.save({"state_dict": {"a": torch.zeros(2, 3)}}, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path).state_dict_metadata["state_dict.a"].size == (2, 3)

    class Harmful:
        def __reduce__(self) -> object:
            return Path.touch, (tmp_path / "touched",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        read_index(tmp_path)
    assert not (tmp_path / "touched").exists()
    (tmp_path / ".metadata").write_bytes(b"\x80\x04 cut")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(tmp_path)
