"""A checkpoint written as another kind of file, in the memory of one tensor."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

import torch

from lightning_shard.checkpoint.conversion.safetensors_files import check_formats, write_safetensors
from lightning_shard.checkpoint.conversion.source import (
    INDEX_OF_SAFETENSORS,
    Source,
    open_source,
    verify,
)
from lightning_shard.checkpoint.files.new import new_file, new_folder
from lightning_shard.checkpoint.files.places import inside, opened
from lightning_shard.checkpoint.files.torch_archive import (
    ArchiveRecord,
    records_awaiting,
    untouched,
    write_archive,
)
from lightning_shard.checkpoint.unread import (
    MadeWhenRead,
    Unread,
    bytes_in,
    exchanged,
    is_unread,
    like,
    memory_of,
    tensors_in,
)
from lightning_shard.data_parallel.optimizer_entries import with_joined
from lightning_shard.errors import ConfigError

_OF_HUGGING_FACE = ("model.safetensors", "model-*-of-*.safetensors", INDEX_OF_SAFETENSORS)
Format = Literal["ckpt", "pt", "safetensors", "huggingface"]
MAX_SHARD_BYTES = 5 * 10**9  # as `save_pretrained` has it
_SUFFIXES: dict[str, Format] = {
    ".ckpt": "ckpt",
    ".pt": "pt",
    ".pth": "pt",
    ".safetensors": "safetensors",
    "": "huggingface",
}
_NOT_WEIGHTS = (  # what Lightning leaves out of a checkpoint with save_weights_only
    "optimizer_states",
    "lr_schedulers",
    "callbacks",
    "MixedPrecision",
    "native_amp_scaling_state",
    "lightning_shard",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Consolidation:
    """How a checkpoint is written elsewhere.

    Attributes:
        to: Kind of the output; by its suffix when left out, a folder where it has none.
        weights_only: Whether a `.ckpt` is written without optimizers and callbacks; the other kinds
            have only weights.
        dtype: Format of floating-point weights; as they are when left out.
        prefix: Only weights whose names begin so are written, without it.
        max_shard_bytes: The longest file of a folder in Hugging Face layout.
        trust: Whether objects may be loaded whose loading runs code.
    """

    to: Format | None = None
    weights_only: bool = False
    dtype: torch.dtype | None = None
    prefix: str = ""
    max_shard_bytes: int = MAX_SHARD_BYTES
    trust: bool = False


@dataclass
class Consolidated:
    """What was written, and the names of what is no tensor and has no place in it."""

    to: Format
    num_tensors: int
    num_bytes: int
    left_out: list[str] = field(default_factory=list)


Written = Callable[[int], None]


def _write(to: Format, path: Any, content: Any, written: Written, options: Consolidation) -> None:
    """Write nested containers with unread tensors."""
    # A file of `torch.save` begins with a pickle, which has shapes alone: each tensor has memory
    # there that nobody touches, and its elements are read when their record is written.
    if to == "huggingface":
        _write_folder(path, list(_shards(content, options.max_shard_bytes)), written)
        return
    with new_file(path) as file:
        if to == "safetensors":
            write_safetensors(file, content, written)
        else:
            write_archive(file, _records(content, written))


def _write_folder(path: Any, shards: list[dict[str, Unread]], written: Written) -> None:
    """Write tensors as `save_pretrained` does: files, and an index of them where several are."""
    names = ["model.safetensors"]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in numbers]
    with new_folder(path, own=_OF_HUGGING_FACE) as folder:
        for name, shard in zip(names, shards, strict=True):
            with opened(inside(folder.path, name), "wb") as file:
                write_safetensors(file, shard, written)
        if len(shards) > 1:
            with opened(inside(folder.path, INDEX_OF_SAFETENSORS), "wb") as file:
                file.write(json.dumps(_index(names, shards), indent=2).encode())


def _shards(tensors: Mapping[str, Unread], max_bytes: int) -> Iterator[dict[str, Unread]]:
    """Yield the tensors of each file; one that is longer than a file may be has its own."""
    shard: dict[str, Unread] = {}
    filled = 0
    for name, tensor in tensors.items():
        if shard and filled + bytes_in(tensor) > max_bytes:
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


def _records(content: Any, written: Written) -> Iterator[ArchiveRecord]:
    """Yield the records of a file, the elements of each tensor as they are read."""
    tensors = dict.fromkeys(tensors_in(content))
    memory = {one: untouched(torch.Size(one.shape), one.dtype) for one in tensors}
    awaiting = exchanged(content, memory.__getitem__)
    if isinstance(awaiting, dict) and (states := awaiting.get("optimizer_states")):
        awaiting = {**awaiting, "optimizer_states": [*map(with_joined, states)]}
    for record, unread in records_awaiting(awaiting, memory):
        if unread is None:
            yield record
        else:
            yield record._replace(content=memory_of(unread.read()))
            written(bytes_in(unread))


def consolidate(
    source: Any,
    output: Any,
    options: Consolidation | None = None,
    progress: Progress = lambda done, total: None,
) -> Consolidated:
    """Write a checkpoint as another kind of file; the output is there whole, or not at all.

    Args:
        source: A folder or a file, local or any path of fsspec's; compared with its checksums.
        output: Path of what is written.
        options: How it is written.
        progress: Called with bytes written and bytes of all.

    Raises:
        CheckpointError: The source is damaged, or the output cannot be written.
        ConfigError: Options that cannot be.
    """
    options = options or Consolidation()
    to = options.to or _format_of(output)
    is_whole = to == "ckpt" and not options.weights_only
    verify(source)
    opened = open_source(
        source, objects=to in ("ckpt", "pt"), trust=options.trust, weights_only=not is_whole
    )
    content, left_out = _content(opened, to, options)
    tensors = {id(one): one for one in tensors_in(content)}.values()
    total = sum(map(bytes_in, tensors))
    done = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    progress(0, total)
    _write(to, output, content, written, options)
    return Consolidated(to, len(tensors), total, left_out)


def _format_of(output: Any) -> Format:
    suffix = PurePosixPath(str(output)).suffix
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"{str(output)!r} ends in {suffix!r}, expected {', '.join(filter(None, _SUFFIXES))}, "
            f"or no suffix for a folder in Hugging Face layout. Give --format, one of "
            f"{', '.join(get_args(Format))}."
        )
    return _SUFFIXES[suffix]


def _content(source: Source, to: Format, options: Consolidation) -> tuple[Any, list[str]]:
    """Return what is written, and the names of what cannot be."""
    weights = _weights(source, options)
    if to == "pt":
        return weights, []
    if to == "ckpt":
        rest = {
            key: value
            for key, value in source.checkpoint.items()
            if not (options.weights_only and key in _NOT_WEIGHTS)
        }
        return {**rest, "state_dict": weights}, []
    tensors = {name: value for name, value in weights.items() if is_unread(value)}
    check_formats(tensors)
    return tensors, [name for name in weights if name not in tensors]


def _weights(source: Source, options: Consolidation) -> dict[str, Any]:
    own: Mapping[str, Any] = source.weights
    if not options.prefix and options.dtype is None and own:
        return source.weights
    chosen = {
        name.removeprefix(options.prefix): value
        for name, value in own.items()
        if name.startswith(options.prefix)
    }
    if not chosen:
        raise ConfigError(
            f"{str(source.path)!r} has no weights whose names begin with {options.prefix!r}; the "
            f"first are {', '.join(list(own)[:5]) or 'none at all'}."
        )
    dtype = options.dtype
    if dtype is None:
        return chosen
    casts: dict[int, Unread] = {}

    def cast(tensor: Unread) -> Unread:
        if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
            return tensor
        made = MadeWhenRead(tensor.shape, dtype, lambda: tensor.read().to(dtype))
        return casts.setdefault(id(tensor), made)

    found = {name: exchanged(value, cast) for name, value in chosen.items()}
    return found if options.prefix else like(own, found)
