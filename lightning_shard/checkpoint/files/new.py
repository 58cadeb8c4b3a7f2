"""A file or a folder that takes its place when all of it is on the disk, or not at all.

    with new_file("last.ckpt") as file:        .last.ckpt.ls-….part ──fsync, rename──> last.ckpt
        file.write(...)
    with new_folder("last.ckpt") as folder:    .last.ckpt.ls-….part/ ──exchange──> last.ckpt/
        ranks write files into `folder`

Whatever ends the process inside, the checkpoint that was there before is as it was, and the next
save into the folder removes the rest.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_shard.checkpoint.files.disk_file import DiskFile
from lightning_shard.checkpoint.files.failures import explaining_failures
from lightning_shard.checkpoint.files.open_folder import INDEX_FILE, OpenFolder, link_or_copy, put
from lightning_shard.checkpoint.files.parts import part_of, remove, remove_leftovers
from lightning_shard.checkpoint.files.places import (
    as_system_errors,
    is_folder,
    local_path,
    remote_place,
)
from lightning_shard.checkpoint.files.remote_folders import (
    holds_others,
    new_edition,
    remove_remote,
)
from lightning_shard.checkpoint.files.renames import put_in_place, sync_file
from lightning_shard.errors import CheckpointError

_OF_CHECKPOINTS = (INDEX_FILE, "meta.pt", "*.distcp")
_OTHERS_OF_CHECKPOINTS = ("checksums*.json", "*.part")


@contextmanager
def new_file(path: Any) -> Iterator[BinaryIO]:
    """Write a file that is there when the block ends, whole, and not at all if it raises.

    Args:
        path: Local, or any path of fsspec's. Folders above it are made. A checkpoint folder of
            this name is replaced; what is no regular file (a pipe) is written as it is.

    Yields:
        A binary file to write to. On an object store what is written arrives at the end.

    Raises:
        CheckpointError: The operating system's reason, or another folder has this name.
    """
    with explaining_failures(path):
        place = local_path(path)
        if place is None:
            with _remote_file(path) as file:
                yield file
        elif _is_special(place):
            with place.open("wb") as file:
                yield file
        else:
            with _local_file(place) as file:
                yield file


@contextmanager
def new_folder(path: Any, *, replaces: bool = False) -> Iterator[OpenFolder]:
    """Write a folder that is there when the block ends, whole, and not at all if it raises.

    One rank enters this, and tells the others the folder; all have written when it leaves. Its
    files are flushed to the disk here; on a filesystem of several hosts each rank calls
    `sync_file` of its own, too.

    Args:
        path: Local, or any path of fsspec's. Folders above it are made. A checkpoint, file or
            folder, of this name is replaced.
        replaces: Whether what is replaced on an object store goes first, for a folder without an
            index.

    Yields:
        The folder to write into. On an object store it is `path` itself, and a new edition of it
        counts once its index (`.metadata`) is put: write that last.

    Raises:
        CheckpointError: The operating system's reason, or a folder of this name is no checkpoint.
    """
    with explaining_failures(path):
        place = local_path(path)
        if place is None:
            if holds_others(path):
                raise _is_another(path, "a folder of checkpoints")
            if replaces:
                remove_remote(path)
            with new_edition(path) as folder:
                yield folder
            return
        _make_room(place)
        if place.is_dir() and not is_checkpoint_folder(place) and any(place.iterdir()):
            raise _is_another(place, "a folder of checkpoints")
        part = part_of(place)
        part.mkdir()
        with _removed_unless_done(part):
            yield OpenFolder(str(part))
            _keep_others(place, part)
            _sync_all(part)
            put_in_place(part, place)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder holds a sharded checkpoint, complete or not."""
    return any(next(path.glob(pattern), None) is not None for pattern in _OF_CHECKPOINTS)


@contextmanager
def _local_file(place: Path) -> Iterator[BinaryIO]:
    _make_room(place)
    if place.is_dir() and not place.is_symlink() and not is_checkpoint_folder(place):
        raise _is_another(place, "a file")
    part = part_of(place)
    with _removed_unless_done(part):
        with closing(DiskFile(part)) as file:
            try:
                yield cast("BinaryIO", file)
            except Exception as error:
                if file.failure is not None:  # torch tells another story of it
                    raise file.failure from error
                raise
            file.finish()
        put_in_place(part, place)


@contextmanager
def _removed_unless_done(part: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove(part)
        raise


def _make_room(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(place.parent)


def _keep_others(place: Path, part: Path) -> None:
    """Give a folder's next checkpoint the files in it that are of none: somebody's notes."""
    if place.is_symlink() or not place.is_dir():
        return
    own = (*_OF_CHECKPOINTS, *_OTHERS_OF_CHECKPOINTS)
    for path in place.iterdir():
        if any(map(path.match, own)):
            continue
        with suppress(FileNotFoundError):  # somebody has just removed it
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, part / path.name, symlinks=True, copy_function=link_or_copy)
            else:
                link_or_copy(path, part / path.name)


def _sync_all(folder: Path) -> None:
    for top, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(top) / name)


def _is_special(place: Path) -> bool:
    try:
        mode = place.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _is_another(place: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{place} was not saved: a folder of this name holds other files, expected {expected} or "
        f"nothing. Remove it, or save under another name."
    )


@contextmanager
def _remote_file(path: Any) -> Iterator[BinaryIO]:
    """Write an object; it is not there before the block ends, and given up if that raises."""
    if is_folder(path):
        if holds_others(path):
            raise _is_another(path, "a file")
        remove_remote(path)
    filesystem, inner = remote_place(path)
    with as_system_errors(), suppress(NotImplementedError):
        filesystem.makedirs(inner.rpartition("/")[0], exist_ok=True)
    with put(filesystem, inner) as file:
        yield cast("BinaryIO", file)
