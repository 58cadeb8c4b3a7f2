"""Reading the index of a folder, which is a pickle, without running what it may hold.

Nothing is looked up but a few classes of torch.distributed.checkpoint, sizes, formats and builtin
containers. An index has texts alone, so that keys of any other kind are written as texts; torch
writes `str(key)`, which an optimizer does not find again.

    "momentum"     momentum
    (1, "a"), 7    ~(1, 'a')   ~7                 what Python reads as it writes it
    Color.RED      ~torch.save:UEsDBAAACAg...     any other object
    "~7"           ~'~7'
"""

import io
import os
import pickle
import warnings
from ast import literal_eval
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from typing_extensions import override

from lightning_shard.checkpoint.files.open_folder import INDEX_FILE, editions_in
from lightning_shard.checkpoint.files.places import fresh_place, inside, local_path, remote_place
from lightning_shard.errors import CheckpointError

_MARK, _PICKLED = "~", "~torch.save:"


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


class IndexedReader(FileSystemReader):
    """Reads a folder whose index was read before."""

    def __init__(self, path: Any, index: Metadata) -> None:
        place = local_path(path)
        super().__init__(path if place is None else place)
        self._index = index
        if place is None:
            self.fs, self.path = _Remote(), os.fspath(path)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _Remote(FileSystem):
    """Opens what fsspec opens."""

    @contextmanager
    @override
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        filesystem, there = remote_place(path)
        with filesystem.open(there, mode) as stream:
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
    found = editions_in({place.relative_path for place in places}) or {""}
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
