"""A folder that is read: its index first, then the boxes that a rank needs, and nothing else.

The index is a pickle, of which nothing is looked up but a few classes of
torch.distributed.checkpoint, sizes, formats and builtin containers.

Folders of this package, of Lightning's `ModelParallelStrategy`, of its `FSDPStrategy` (which calls
the weights "model"), and of `dcp.save` with the same keys differ in nothing else.
"""

import io
import os
import pickle
import re
import warnings
from ast import literal_eval
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from io import BytesIO
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from typing_extensions import override

from lightning_shard.checkpoint.files.open_folder import (
    CHECKSUMS,
    INDEX_FILE,
    META_FILE,
    edition_in,
    in_edition,
    read_checksums,
    verify_folder,
)
from lightning_shard.checkpoint.files.parts import is_leftover
from lightning_shard.checkpoint.files.places import (
    file_sizes,
    fresh_place,
    inside,
    is_file,
    local_path,
    opened,
)
from lightning_shard.checkpoint.files.reading import read_file
from lightning_shard.checkpoint.files.torch_archive import PART_BYTES
from lightning_shard.checkpoint.sharded.boxed_tensor import (
    BoxedTensor,
    bytes_before_elements,
    is_plain,
)
from lightning_shard.checkpoint.unread import exchanged, tensors_in
from lightning_shard.errors import CheckpointError

_MARK, _PICKLED = "~", "~torch.save:"
_OF_RANK = re.compile(r"__(\d+)_")


# An index has texts alone, so that keys of any other kind are written as texts; torch writes
# `str(key)`, which an optimizer does not find again.
#
#     "momentum"     momentum
#     (1, "a"), 7    ~(1, 'a')   ~7                 what Python reads as it writes it
#     Color.RED      ~torch.save:UEsDBAAACAg...     any other object
#     "~7"           ~'~7'


def with_keys(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested mappings and lists with their keys changed."""
    if isinstance(value, list):
        return [with_keys(one, change) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {change(key): with_keys(one, change) for key, one in value.items()}


def text_of(key: Any) -> str:
    """Return the text that stands for a key, the same on all ranks."""
    if type(key) is str and not key.startswith(_MARK):
        return key
    with suppress(ValueError, SyntaxError):  # Python does not read what it writes of an object
        if repr(literal_eval(repr(key))) == repr(key):
            return f"{_MARK}{key!r}"
    file = BytesIO()
    torch.save(key, file)
    return f"{_PICKLED}{b64encode(file.getbuffer()).decode()}"


def key_of(text: str, unpickled: Callable[[bytes], Any]) -> Any:
    """Return the key that a text stands for; an object is made by `unpickled`."""
    if text.startswith(_PICKLED):
        return unpickled(b64decode(text.removeprefix(_PICKLED)))
    with suppress(ValueError, SyntaxError):  # a text of somebody else's
        return literal_eval(text.removeprefix(_MARK)) if text.startswith(_MARK) else text
    return text


_OF_CHECKPOINTS = "torch.distributed.checkpoint."
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_OTHERS = {
    *(("pathlib", name) for name in _PATHS),
    *(("pathlib._local", name) for name in _PATHS),  # from Python 3.13 on
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "dict"),
    ("builtins", "list"),
}


@contextmanager
def by_itself() -> Iterator[None]:
    """Let a rank save or load by itself inside without a warning that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        yield


class _Remote(FileSystem):
    """Opens what fsspec opens."""

    @contextmanager
    @override
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with opened(path, mode) as stream:
            yield stream

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return inside(path, suffix)


def read_index(path: Any) -> Metadata:
    """Return the index of a folder, local or remote."""
    try:
        filesystem, there = fresh_place(inside(path, INDEX_FILE))
        with filesystem.open(there, "rb") as file:
            index = _Unpickler(io.BytesIO(file.read())).load()
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(path)!r} is a folder without {INDEX_FILE}, expected a checkpoint's, which is "
            f"written last: saving has not come to its end. Load another checkpoint."
        ) from error
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"The index {inside(path, INDEX_FILE)!r} of a checkpoint is damaged ({error!r}), "
            f"expected what torch.distributed.checkpoint writes. Load another checkpoint."
        ) from error
    if not isinstance(index, Metadata):
        raise CheckpointError(
            f"The index {inside(path, INDEX_FILE)!r} of a checkpoint is a {type(index).__name__}, "
            f"expected a Metadata of torch.distributed.checkpoint. Load another checkpoint."
        )
    if not _is_sound(index):
        raise CheckpointError(
            f"The index {inside(path, INDEX_FILE)!r} of a checkpoint is damaged: it says of "
            f"something in no way that can be read where it lies, expected what "
            f"torch.distributed.checkpoint writes. Load another checkpoint."
        )
    if lacking := sorted(key for key in index.state_dict_metadata if not _is_listed(index, key)):
        raise CheckpointError(
            f"The index {inside(path, INDEX_FILE)!r} of a checkpoint lacks a part of "
            f"{', '.join(map(repr, lacking[:3]))} ({len(lacking)} of "
            f"{len(index.state_dict_metadata)} entries), expected where all of each lies. Copy "
            f"the whole folder again from where it is whole, or load another checkpoint."
        )
    return index


def _is_listed(index: Metadata, key: str) -> bool:
    """Whether an index tells of all parts of an entry, and where they lie."""
    entry, places = index.state_dict_metadata[key], index.storage_data or {}
    if isinstance(entry, BytesStorageMetadata):
        return MetadataIndex(key) in places
    placed = [one for one in entry.chunks if MetadataIndex(key, one.offsets) in places]
    return sum(one.sizes.numel() for one in placed) >= entry.size.numel()


def _is_sound(index: Metadata) -> bool:
    """Whether all that an index says has the form that whoever reads it relies on."""
    try:
        entries, places = index.state_dict_metadata, index.storage_data or {}
        return (
            all(isinstance(key, str) for key in entries)
            and all(map(_is_entry, entries.values()))
            and all(isinstance(one.fqn, str) for one in places)
            and all(
                isinstance(one.relative_path, str) and one.offset >= 0 and one.length >= 0
                for one in places.values()
            )
            and all(isinstance(path, tuple) for path in (index.planner_data or {}).values())
        )
    except Exception:  # of an attribute that is not there, or of any type
        return False


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    boxes = [(entry.size, entry.size), *((one.offsets, one.sizes) for one in entry.chunks)]
    are_sizes = all(isinstance(one, torch.Size) for box in boxes for one in box)
    return are_sizes and isinstance(entry.properties.dtype, torch.dtype)


def edition_of(path: Any, index: Metadata) -> str:
    """Return the edition of a folder whose files an index names; "" where there is none."""
    places = (index.storage_data or {}).values()
    found = {edition_in(place.relative_path) for place in places} or {""}
    if len(found) > 1:
        raise CheckpointError(
            f"The index {inside(path, INDEX_FILE)!r} of a checkpoint is damaged: it names files of "
            f"the editions {sorted(found)}, expected one. Load another checkpoint."
        )
    return found.pop()


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _OTHERS:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if module_name.startswith(_OF_CHECKPOINTS) and global_name.isidentifier():
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and found.__module__.startswith(_OF_CHECKPOINTS):
                return found
        raise CheckpointError(
            f"The index of a checkpoint asks for {module_name}.{global_name}, expected only what "
            f"torch.distributed.checkpoint writes; nothing of it was run. Load a checkpoint from a "
            f"source that you trust."
        )


class BoxReader(FileSystemReader):
    """Reads a folder whose index was read before; holds a few megabytes beside what it fills.

        file    ... ┌ archive of one box: head │ elements │ tail ┐ ...
                                                 ├──────┤           what this rank needs of it

    torch's own reader makes a tensor of the whole box first, which may be much more than a rank
    needs of it: a quarter of the columns of boxes of 134 MB takes it 256 MB and .34 s of a
    processor, 8 MB and .13 s here. It still reads boxes with another head than is written of their
    shape (somebody's own format, strides).
    """

    def __init__(self, path: Any, index: Metadata) -> None:
        place = local_path(path)
        super().__init__(path if place is None else place)
        self._index = index
        if place is None:
            self.fs, self.path = _Remote(), os.fspath(path)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        left: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda one: self.storage_data[one.storage_index].offset):
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for path, items in by_file.items():  # in the order in which they lie there
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as file:
                left += [item for item in items if not self._read(file, item, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read an item, if its elements lie in order; return whether it was."""
        place, stored = self.storage_data[item.storage_index], self._box(item.storage_index)
        if stored is None or place.transform_descriptors:
            return False
        shape, dtype = stored
        target = planner.resolve_tensor(item)
        if not is_plain(target) or target.shape != item.lengths or not target.numel():
            return False
        head = bytes_before_elements(shape, dtype)
        file.seek(place.offset)
        if file.read(len(head)) != head:
            return False
        read_part(file, place.offset + len(head), shape, dtype, item.storage_offsets, target)
        planner.commit_tensor(item, target)
        return True

    def _box(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype] | None:
        """Return shape and format of a stored box, as the index tells them; None for no tensor."""
        entry = self._index.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        chunks = [one for one in entry.chunks if one.offsets == index.offset]
        return (chunks[0].sizes, entry.properties.dtype) if len(chunks) == 1 else None


@torch.no_grad()
def read_part(
    file: Any,
    begin: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: Tensor,
) -> None:
    """Read a contiguous part of a box, which begins at byte `begin`, of the shape of `target`."""
    if not shape:
        shape, offsets, target = (1,), (0,), target.view(1)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    begin += offsets[0] * row_bytes
    lies_so = target.is_contiguous() and target.is_cpu and target.dtype == dtype
    if lies_so and target.shape[1:] == torch.Size(shape[1:]):
        _fill(file, begin, target)
    elif row_bytes > PART_BYTES:
        for number, row in enumerate(target):
            read_part(file, begin + number * row_bytes, shape[1:], dtype, offsets[1:], row)
    else:
        columns = [
            slice(first, first + size)
            for first, size in zip(offsets[1:], target.shape[1:], strict=True)
        ]
        num_rows = PART_BYTES // row_bytes
        for first in range(0, len(target), num_rows):
            rows = target[first : first + num_rows]
            read = torch.empty((len(rows), *shape[1:]), dtype=dtype)
            _fill(file, begin + first * row_bytes, read)
            rows.copy_(read[(slice(None), *columns)])


def _fill(file: Any, begin: int, tensor: Tensor) -> None:
    memory = tensor.detach().view(-1).view(torch.uint8).numpy().data
    file.seek(begin)
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise OSError(f"it ends {len(memory) - done} bytes before the end of a tensor")
        done += count


class StoredTensor:
    """A tensor in a folder, of which nothing has been read."""

    def __init__(self, folder: "StoredFolder", key: str, metadata: TensorStorageMetadata) -> None:
        self.folder, self.key = folder, key
        self.shape, self.dtype = metadata.size, metadata.properties.dtype

    def read(self) -> Tensor:
        """Read it by itself, full."""
        full = torch.empty(self.shape, dtype=self.dtype)
        self.folder.read({self.key: full})
        return full

    def placeholder(self) -> Tensor:
        """Return a tensor of this shape and format without elements, on torch's "meta" device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class StoredFolder:
    """What a folder holds, local or any path of fsspec's; raises if its index is damaged."""

    def __init__(self, path: Any, weights_only: bool | None = None) -> None:
        self.path = path
        self._weights_only = weights_only
        self._index = read_index(path)
        self.edition = edition_of(path, self._index)

    @cached_property
    def _values(self) -> dict[str, Any]:
        """Everything that is not a tensor, by key."""
        keys = [key for key in self._entries if not _is_tensor(self._entries[key])]
        return self.read(dict.fromkeys(keys))

    @property
    def _entries(self) -> Mapping[str, Any]:
        return self._index.state_dict_metadata

    @property
    def parts(self) -> dict[str, int]:
        """By file that the index refers to, how long it must be at least."""
        lengths: dict[str, int] = {}
        for place in (self._index.storage_data or {}).values():
            end = place.offset + place.length
            lengths[place.relative_path] = max(end, lengths.get(place.relative_path, 0))
        return lengths

    def lacking(self) -> list[str]:
        """Return as clauses which files it lacks, by their names and lengths."""
        lengths, expected = file_sizes(self.path), dict(self.parts)
        known = read_checksums(self.path, self.edition)
        expected |= {name: checksum["bytes"] for name, checksum in (known or {}).items()}
        found = [
            f"{name} is missing, expected {expected[name]} bytes"
            if name not in lengths
            else f"{name} has {lengths[name]} bytes, expected {expected[name]}"
            for name in sorted(expected)
            if lengths.get(name, -1) < expected[name]
        ]
        if known is None and self._is_ours:
            found.insert(0, f"{CHECKSUMS} is missing, expected the checksums of its files")
        return found

    def check_complete(self) -> None:
        """Look for all files; nothing of them is read."""
        if found := self.lacking():
            raise CheckpointError(
                f"The checkpoint {str(self.path)!r} is not complete: {'; '.join(found)}. Copy the "
                f"whole folder again from where it is whole, or load another checkpoint."
            )

    def verify_share(self, rank: int, num_ranks: int) -> None:
        """Compare a rank's share of the files with their checksums; all ranks' are all files.

        A rank takes the files that the same rank has written, which it reads next where the layout
        is the same: its host has them in memory then.
        """
        self.check_complete()
        names = sorted(read_checksums(self.path, self.edition) or ())
        own = [name for name in names if _writer_of(name) % num_ranks == rank]
        verify_folder(self.path, own, edition=self.edition)

    @property
    def _is_ours(self) -> bool:
        """Whether this package has written it, under the name of a folder that is not whole yet."""
        told = getattr(self._index.storage_meta, "checkpoint_id", None)
        return told is not None and is_leftover(told)

    @property
    def roots(self) -> list[str]:
        """The first part of every key's path."""
        return list(dict.fromkeys(str(self._path(key)[0]) for key in self._entries))

    def _path(self, key: str) -> tuple[str | int, ...]:
        """Return the keys and list indices under which a value was before it was flattened."""
        known: Mapping[str, tuple[str | int, ...]] = self._index.planner_data or {}
        if key in known:
            return tuple(known[key])
        root, _, rest = key.partition(".")
        return (root, rest) if rest else (root,)

    def nested(self, root: str) -> Any:
        """Return what was saved under `root`, with tensors that are not read; {} for nothing."""
        top: dict[str, Any] = {}
        for key, entry in self._entries.items():
            path = self._path(key)
            if path[0] == root:
                value = StoredTensor(self, key, entry) if _is_tensor(entry) else self._values[key]
                _put(top, path, value)
        unpickled = partial(self.unpickled, what=f"A key of {root!r}")
        return with_keys(top.get(root, {}), lambda text: key_of(text, unpickled))

    def read(self, targets: dict[str, Any]) -> dict[str, Any]:
        """Fill tensors or boxes, by key, and return everything; None asks for what is no tensor."""
        if not targets:
            return targets
        try:
            with by_itself():
                load(
                    targets,
                    storage_reader=BoxReader(self.path, self._index),
                    planner=_LoadPlanner(self._weights_only),
                    no_dist=True,
                )
        except CheckpointException as error:
            self._verify(targets)  # a peer that verifies that file may not have come to it yet
            told = "; ".join(repr(one) for one, _ in error.failures.values())
            raise CheckpointError(
                f"The checkpoint {str(self.path)!r} cannot be read ({told}), expected all that its "
                f"index lists. Load another checkpoint."
            ) from error
        return targets

    def _verify(self, targets: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a file that holds something of the targets is damaged."""
        places = (self._index.storage_data or {}).items()
        files = {place.relative_path for index, place in places if index.fqn in targets}
        verify_folder(self.path, sorted(files), edition=self.edition)

    def unpickled(self, content: bytes, what: str) -> Any:
        """Return what `torch.save` has made bytes of, with as much trust as in the folder."""
        try:
            return torch.load(io.BytesIO(content), "cpu", weights_only=self._weights_only)
        except Exception as error:  # of objects, or whatever a damaged one leads to
            raise CheckpointError(
                f"{what} cannot be loaded from the checkpoint {str(self.path)!r} "
                f"({str(error).strip().partition(chr(10))[0]}), expected tensors and plain values. "
                f"Where it holds objects, such as those of a loader's state, pass "
                f"weights_only=False if you trust whoever has written it: loading them runs code."
            ) from error

    def meta(self) -> dict[str, Any]:
        """Return what Lightning keeps besides; what it needs at least where there is none."""
        path = inside(self.path, self.meta_name)
        if not is_file(path):
            return {}
        meta: dict[str, Any] = read_file(path, "cpu", self._weights_only)
        return meta

    @property
    def meta_name(self) -> str:
        """Name of the file of what Lightning keeps besides."""
        return in_edition(META_FILE, self.edition)


def verify_whole(path: Any) -> bool:
    """Compare all files of a folder with their checksums; return whether it has any."""
    folder = StoredFolder(path)
    folder.verify_share(0, 1)
    return read_checksums(path, folder.edition) is not None


def _writer_of(name: str) -> int:
    found = _OF_RANK.match(name)
    return 0 if found is None else int(found[1])


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into boxes too, and never unpickles more than it may."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=self._weights_only
        )

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, BoxedTensor):
            return value.__get_tensor_shard__(index)
        tensor: Tensor = super().lookup_tensor(index)
        return tensor


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _put(container: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value where it was before the state was flattened; an index belongs to a list."""
    for key, following in pairwise(path):
        made: Any = {} if isinstance(following, str) else []
        if isinstance(container, list):
            _extend(container, key)
            if container[key] is None:
                container[key] = made
            container = container[key]
        else:
            container = container.setdefault(key, made)
    if isinstance(container, list):
        _extend(container, path[-1])
    container[path[-1]] = value


def _extend(container: list[Any], index: Any) -> None:
    container += [None] * (index + 1 - len(container))


def read_all(nested: Any) -> Any:
    """Return nested mappings and lists with all tensors read, full."""
    stored: list[Any] = list(tensors_in(nested))
    if not stored:
        return nested
    full = {one.key: torch.empty(one.shape, dtype=one.dtype) for one in stored}
    stored[0].folder.read(dict(full))
    return exchanged(nested, lambda one: full[one.key])
