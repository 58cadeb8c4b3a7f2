"""The archive that is written here is the one that torch writes, and torch reads it."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from lightning_shard.checkpoint.files import torch_archive
from lightning_shard.checkpoint.files.reading import check_archive
from lightning_shard.checkpoint.files.torch_archive import joined_crc, records_of, write_archive
from tests.checkpoint.files.archives import checkpoint, same


class Plain:
    """An object among the hyperparameters."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain)

    __hash__ = None  # type: ignore[assignment]


def written(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    write_archive(file, records_of(content))
    file.seek(0)
    return file


def of_torch(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    return file


def contents(file: io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_records_are_those_of_torch_save() -> None:
    ours, theirs = contents(written(checkpoint())), contents(of_torch(checkpoint()))
    number = "archive/.data/serialization_id"
    assert len(ours.pop(number)) == len(theirs.pop(number))
    assert ours == theirs


def test_the_number_of_an_archive_is_of_its_content() -> None:
    name = "archive/.data/serialization_id"
    one, again = (contents(written({"a": torch.ones(3)}))[name] for _ in range(2))
    other = contents(written({"a": torch.zeros(3)}))[name]
    assert one == again != other


@pytest.mark.parametrize("long_from", [torch_archive._LONG_FROM, 150])
def test_torch_loads_it_and_maps_it_into_memory(tmp_path: Path, long_from: int) -> None:
    shared = torch.arange(12.0)
    content = {
        **checkpoint(),
        "views": [shared[2:5], shared.view(3, 4).T, shared],
        "kinds": [torch.empty(0), torch.ones((), dtype=torch.bfloat16), torch.tensor([True])],
        "text": "ü" * 3,
    }
    path = tmp_path / "one.ckpt"
    with patch.object(torch_archive, "_LONG_FROM", long_from):
        path.write_bytes(written(content).getvalue())
    for options in ({"weights_only": True}, {"mmap": True}):
        loaded = torch.load(path, **options)
        assert same(loaded, content)
        views = loaded["views"]
        assert views[0].untyped_storage().data_ptr() == views[2].untyped_storage().data_ptr()
    with path.open("rb") as file:
        check_archive(file)


def test_torch_may_compute_where_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch compares it with where they are
    path = tmp_path / "one.ckpt"
    path.write_bytes(written(checkpoint()).getvalue())
    with config.patch({"load.calculate_storage_offsets": True}):
        assert same(torch.load(path, mmap=True), checkpoint())


def test_objects_are_pickled_as_ever() -> None:
    file = written({"hyper_parameters": {"plain": Plain()}})
    assert torch.load(file, weights_only=False)["hyper_parameters"]["plain"] == Plain()


def test_nothing_is_written_of_what_cannot_be_pickled() -> None:
    with pytest.raises(AttributeError, match="local object"):
        records_of({"hyper_parameters": lambda: None})


@given(st.binary(), st.binary())
def test_it_is_that_of_both_together(one: bytes, other: bytes) -> None:
    assert joined_crc(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def test_a_long_string() -> None:
    one, other = b"begin", bytes(range(256)) * 5000
    assert joined_crc(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)
