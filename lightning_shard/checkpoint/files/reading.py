"""Reading a checkpoint file: verified first, and every failure told by name.

missing, empty, no checkpoint, truncated, damaged    told before anything of it is loaded
objects where only tensors are asked for             told with their names
written by torch before 1.6                          loads; such files have no checksums
"""

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_shard.checkpoint.files.places import local_path, remote_place
from lightning_shard.checkpoint.files.stored_archive import (
    ALL,
    ArchiveFile,
    DamagedError,
    Share,
    check_archive,
)
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError

_ARCHIVE = b"PK\x03\x04"
_OLD = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number that files without an archive begin with
_HEAD_BYTES = 32
_ANOTHER = "Load another checkpoint, or copy this one again from where it is whole."


def read_file(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load what `torch.save` has written, after comparing it with its checksums.

    Args:
        path: Local, or any path of fsspec's. A remote file is copied to a temporary one first.
        map_location: As in `torch.load`.
        weights_only: As in `torch.load`.

    Raises:
        CheckpointError: The file cannot be read, is none of a checkpoint, is damaged, or holds
            objects where only tensors were asked for.
        CheckpointNotFoundError: There is no file, which is a `FileNotFoundError`, too.
    """
    with _local_copy(path) as (source, file):
        _check(path, file)
        return _loaded(path, source, map_location, weights_only, mmap=False)


def read_mapped(path: Any, weights_only: bool | None = None, *, share: Share = ALL) -> Any:
    """Load a file with its tensors mapped into memory: what is not looked at is not read.

    They are on the CPU, and can be written to, which does not change the file. Who keeps one must
    copy it, since the file may become shorter later. Of a local file the checksums of a share of
    the tensors are compared here, and others compare the rest; of a remote one, which is copied,
    all are.
    """
    with _local_copy(path) as (source, file):
        is_archive = _check(path, file, share if local_path(path) is not None else ALL)
        return _loaded(path, source, "cpu", weights_only, mmap=is_archive)


def _loaded(
    path: Any, source: Path, map_location: Any, weights_only: bool | None, *, mmap: bool
) -> Any:
    try:
        return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:
        raise _not_loaded(path, source, weights_only, error) from error


@contextmanager
def _local_copy(path: Any) -> Iterator[tuple[Path, BinaryIO]]:
    """Open a file, on this machine's filesystems."""
    place = local_path(path)
    if place is not None:
        with _open(path, place) as file:
            yield place, file
        return
    with tempfile.NamedTemporaryFile(prefix="lightning_shard_", suffix=".ckpt") as copy:
        try:
            filesystem, inner = remote_place(path)
            with filesystem.open(inner, "rb") as remote:
                shutil.copyfileobj(remote, copy, 1 << 22)
            copy.flush()
        except OSError as error:
            raise _cannot_read(path, error) from error
        with open(copy.name, "rb", buffering=0) as file:
            yield Path(copy.name), file


def _open(path: Any, place: Path) -> Any:
    try:
        return place.open("rb", buffering=0)
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{os.fspath(path)} is a folder, expected a checkpoint file. {_ANOTHER}"
        ) from error
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Any, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(
            f"Checkpoint file not found: {os.fspath(path)}. Expected a file that this host can "
            f"see; check the path, and that the folder is shared by all hosts."
        )
    return CheckpointError(
        f"{os.fspath(path)} cannot be read: {error.strerror or error}. {_ANOTHER}"
    )


def _check(path: Any, file: BinaryIO, share: Share = ALL) -> bool:
    """Check a file, and return whether it is an archive; before torch 1.6 there were none."""
    try:
        head = file.read(_HEAD_BYTES)
        if head.startswith(_ARCHIVE):
            check_archive(file, share)
    except OSError as error:
        raise _cannot_read(path, error) from error
    except DamagedError as error:
        raise _damaged(path, file, error) from error
    if not head:
        raise CheckpointError(f"{os.fspath(path)} is empty, expected a checkpoint. {_ANOTHER}")
    if not head.startswith(_ARCHIVE) and _OLD not in head:
        raise CheckpointError(
            f"{os.fspath(path)} is no checkpoint, or its beginning is damaged: it begins with "
            f"{head[:8]!r}, expected {_ARCHIVE!r} as torch.save writes. {_ANOTHER}"
        )
    return head.startswith(_ARCHIVE)


def _damaged(path: Any, file: BinaryIO, error: DamagedError) -> CheckpointError:
    if not error.record:
        length = file.seek(0, os.SEEK_END)
        return CheckpointError(
            f"{os.fspath(path)} is damaged or not complete, at {length} bytes: {error}. {_ANOTHER}"
        )
    name = None
    with suppress(Exception):  # of a file that is damaged, and more than the name is not there
        name = ArchiveFile(file.name).name_of(error.record)
    tensor = f", of {name!r}," if name else ""
    return CheckpointError(
        f"{os.fspath(path)} is damaged: the record {error.record!r}{tensor} is not as it was "
        f"written: {error}. {_ANOTHER}"
    )


def _not_loaded(
    path: Any, source: Path, weights_only: bool | None, error: Exception
) -> CheckpointError:
    """Return the error of a file that is as it was written, and does not load."""
    is_refused = weights_only is not False and isinstance(error, pickle.UnpicklingError)
    names = _objects_in(source) if is_refused else []
    if names:
        return CheckpointError(
            f"{os.fspath(path)} holds objects of {', '.join(names)}, and weights_only="
            f"{weights_only} loads only tensors and plain values. Pass weights_only=False if you "
            f"trust whoever has written it: loading them runs code. Or allow these classes with "
            f"torch.serialization.add_safe_globals."
        )
    told = str(error).strip().partition("\n")[0]
    return CheckpointError(
        f"{os.fspath(path)} cannot be loaded: {type(error).__name__}: {told}. Expected what "
        f"torch.save has written, and the classes of the objects in it to be importable here."
    )


def _objects_in(source: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # there are no names to tell
        return []


def verify_file(path: Any) -> None:
    """Compare a file of `torch.save` with its checksums, and load nothing."""
    with _local_copy(path) as (_, file):
        _check(path, file)
