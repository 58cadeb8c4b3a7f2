"""Which entry of Lightning's checkpoint goes where in a folder, and back."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_shard.checkpoint.sharded.entries import (
    checkpoint_of,
    folder_entries,
)
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.checkpoint.sharded.writing import write_folder


def folder_of(path: Path, state: dict[str, Any], meta: Any = None) -> StoredFolder:
    write_folder(path, state, meta or {}, None)
    return StoredFolder(path)


def test_what_was_taken_apart_comes_back(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 3,
    }
    names = {param: name for name, param in module.named_parameters()}
    state, meta = folder_entries(saved, [optimizer], names, keeps=True)
    assert (set(state), meta) == ({"state_dict", "optimizer_0"}, {"epoch": 3})
    folder = folder_of(tmp_path / "folder", state, meta)
    found = checkpoint_of(folder, in_full=True)
    assert (found["epoch"], found["global_step"]) == (3, 0)
    torch.testing.assert_close(found["state_dict"], dict(module.state_dict()), rtol=0, atol=0)
    (found_state,) = found["optimizer_states"]
    assert isinstance(found_state["state"]["weight"]["exp_avg"], StoredTensor)
    assert found_state["param_groups"][0]["params"] == ["weight", "bias"]
    unread = checkpoint_of(folder, in_full=False)["state_dict"]
    assert all(isinstance(one, StoredTensor) for one in unread.values())


def test_ranks_that_keep_nothing_write_their_boxes_alone() -> None:
    state, meta = folder_entries({"state_dict": {"a": 1}, "epoch": 3}, [], {}, keeps=False)
    assert (state, meta) == ({"state_dict": {}}, {"epoch": 3})
