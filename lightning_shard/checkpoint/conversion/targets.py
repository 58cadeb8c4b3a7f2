"""What a checkpoint is written as, one tensor at a time: each kind's file is there whole or not.

A file of `torch.save` begins with a pickle, which has shapes alone: each tensor has memory there
that nobody touches, and its elements are read when their record is written.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from lightning_shard.checkpoint.conversion.safetensors_files import write_safetensors
from lightning_shard.checkpoint.conversion.source import INDEX_OF_SAFETENSORS
from lightning_shard.checkpoint.conversion.unread import Unread, bytes_in, exchanged, memory_of
from lightning_shard.checkpoint.files.new import new_file, new_folder
from lightning_shard.checkpoint.files.places import inside, remote_place
from lightning_shard.checkpoint.files.torch_archive import Record, records_of, write_archive
from lightning_shard.checkpoint.files.untouched import untouched

Written = Callable[[int], None]


class Target(Protocol):
    """Writes nested containers with unread tensors."""

    def __call__(self, path: Any, content: Any, written: Written) -> None:
        """Write them to `path`, and call `written` with the number of bytes after each tensor."""


def write_archive_file(path: Any, content: Any, written: Written) -> None:
    """Write a file that `torch.load` reads."""
    with new_file(path) as file:
        write_archive(file, _records(content, written))


def write_safetensors_file(path: Any, content: Mapping[str, Unread], written: Written) -> None:
    """Write all tensors into one file of safetensors."""
    with new_file(path) as file:
        write_safetensors(file, content, written)


class HuggingFaceFolder:
    """Writes tensors as `save_pretrained` does: files of a limited size, and an index of them.

    Args:
        max_shard_bytes: The longest that the tensors of a file may be together; a tensor that is
            longer has a file of its own.
    """

    def __init__(self, max_shard_bytes: int) -> None:
        self._max_shard_bytes = max_shard_bytes

    def __call__(self, path: Any, content: Mapping[str, Unread], written: Written) -> None:
        """Write the folder; one file has no index."""
        shards = list(self._shards(content))
        names = [
            f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)
        ]
        if len(shards) == 1:
            names = ["model.safetensors"]
        with new_folder(path, replaces=True) as folder:
            for name, shard in zip(names, shards, strict=True):
                filesystem, inner = remote_place(inside(folder.path, name))
                with filesystem.open(inner, "wb") as file:
                    write_safetensors(file, shard, written)
            if len(shards) > 1:
                index = _index(names, shards)
                filesystem, inner = remote_place(inside(folder.path, INDEX_OF_SAFETENSORS))
                with filesystem.open(inner, "wb") as file:
                    file.write(json.dumps(index, indent=2).encode())

    def _shards(self, tensors: Mapping[str, Unread]) -> Iterator[dict[str, Unread]]:
        shard: dict[str, Unread] = {}
        filled = 0
        for name, tensor in tensors.items():
            if shard and filled + bytes_in(tensor) > self._max_shard_bytes:
                yield shard
                shard, filled = {}, 0
            shard[name] = tensor
            filled += bytes_in(tensor)
        yield shard


def _index(names: list[str], shards: list[dict[str, Unread]]) -> dict[str, Any]:
    total = sum(bytes_in(tensor) for shard in shards for tensor in shard.values())
    pairs = zip(names, shards, strict=True)
    places = {tensor: name for name, shard in pairs for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _records(content: Any, written: Written) -> Iterator[Record]:
    """Yield the records of a file, the elements of each tensor as they are read."""
    memory: dict[int, torch.Tensor] = {}
    by_address: dict[int, Unread] = {}

    def placeholder(tensor: Unread) -> torch.Tensor:
        if id(tensor) not in memory:
            made = memory[id(tensor)] = untouched(torch.Size(tensor.shape), tensor.dtype)
            if made.numel():
                by_address[made.untyped_storage().data_ptr()] = tensor
        return memory[id(tensor)]

    for record in records_of(exchanged(content, placeholder)):
        unread = by_address.get(_address(record.content))
        if unread is None:
            yield record
        else:
            yield record._replace(content=memory_of(unread.read()))
            written(bytes_in(unread))


def _address(content: object) -> int:
    return content.data_ptr() if isinstance(content, torch.UntypedStorage) else 0
