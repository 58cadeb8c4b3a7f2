"""A folder is written and read in a few megabytes beside what is saved and what is filled."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.files import open_folder, torch_archive
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder
from lightning_shard.core.layout import Box, whole
from tests.benchmarks.checkpoints import peak_above

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
COLUMNS = 1 << 12
MEGABYTES = 256
SHAPE = (MEGABYTES << 8 >> 2, COLUMNS)
BOUND = 64.0


def test_the_buffers_are_less_than_a_unit() -> None:
    assert open_folder.NUM_BUFFERS * open_folder.BUFFER_BYTES + torch_archive.PART_BYTES <= 16 << 20


@pytest.mark.parametrize(
    "view", [lambda rows: rows[1:], lambda rows: rows[:, :-1]], ids=["rows", "columns"]
)
def test_a_save_and_a_load_of_a_part(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    saved = view(torch.randn(SHAPE))
    assert saved.nbytes > 3 * BOUND * 1e6
    boxed = BoxedTensor(saved.shape, saved.dtype, [(whole(saved.shape), saved)])
    with peak_above() as peak:
        write_folder(tmp_path / "one", {"a": boxed}, {}, None)
    assert 0 < peak[0] < BOUND
    target = torch.zeros(100, 1000)
    part = BoxedTensor(saved.shape, saved.dtype, [(Box((5000, 77), (100, 1000)), target)])
    folder = StoredFolder(tmp_path / "one")
    with peak_above() as peak:
        folder.read({"a": part})
    assert peak[0] < BOUND
    assert torch.equal(target, saved[5000:5100, 77:1077])
