"""A file or a folder that takes its place when all of it is on the disk, or not at all.

    with new_file("last.ckpt") as file:        .last.ckpt.ls-….part ──fsync, rename──> last.ckpt
        file.write(...)
    with new_folder("last.ckpt") as folder:    .last.ckpt.ls-….part/ ──exchange──> last.ckpt/
        ranks write files into `folder`

On object stores nothing is renamed and folders are but names:

    .saving.ls-….part         who writes, and which folder    beside it, first
    last.ckpt/meta.….pt       the files of a new edition      beside those of the one before
    last.ckpt/.metadata       names the new edition           in one step: from here on it counts
    last.ckpt/meta.pt         a copy, for other readers
                              the edition before goes, and who has written

What a killed writer has left goes with the next save beside it.

fsspec's transactions are of single objects, and are used so; of a local file one is a move that
flushes nothing to the disk, and that leaves what a killed writer has begun.
"""

import ctypes
import errno
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from lightning_shard.checkpoint.files.open_folder import (
    INDEX_FILE,
    META_FILE,
    DiskFile,
    OpenFolder,
    edition_in,
    in_edition,
    link_or_copy,
    put,
)
from lightning_shard.checkpoint.files.parts import (
    changed_lately,
    is_leftover,
    part_of,
    remove,
    remove_leftovers,
    writer_lives,
)
from lightning_shard.checkpoint.files.places import (
    as_system_errors,
    fresh_place,
    is_folder,
    local_path,
    names_in,
    remote_place,
)
from lightning_shard.errors import CheckpointError

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_TAKEN = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR}
_TRIES = 20
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR}
_ADVICE = {
    errno.ENOSPC: "Free space there, or save elsewhere (ModelCheckpoint(dirpath=...)); "
    "ModelCheckpoint(save_top_k=...) keeps fewer files.",
    errno.EDQUOT: "Free space of your quota, or save elsewhere (ModelCheckpoint(dirpath=...)).",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f, RLIMIT_FSIZE, or the filesystem's).",
    errno.EACCES: "Make the folder writable for this user, or save elsewhere.",
    errno.EPERM: "Make the folder writable for this user, or save elsewhere.",
    errno.EROFS: "Save on another filesystem (ModelCheckpoint(dirpath=...)).",
    errno.ENAMETOOLONG: "Give a shorter name (ModelCheckpoint(filename=...)).",
    errno.EEXIST: "Give a path whose parents are folders.",
    errno.ENOTDIR: "Give a path whose parents are folders.",
    errno.EIO: "The disk or its connection has failed; save elsewhere.",
}


def not_saved(path: Any, error: OSError) -> CheckpointError:
    """Return the error that says why nothing was saved under `path`."""
    reason = error.strerror or str(error) or type(error).__name__
    name = errno.errorcode.get(error.errno or 0)
    advice = _ADVICE.get(error.errno or 0, "Mend that, or save elsewhere.")
    return CheckpointError(
        f"{os.fspath(path)} was not saved: {reason}{f' ({name})' if name else ''}. What was there "
        f"before is as it was. {advice}"
    )


@contextmanager
def explaining_failures(path: Any) -> Iterator[None]:
    """Raise errors of the operating system as those of the checkpoint that is being saved."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise not_saved(path, error) from error


def put_in_place(part: Path, place: Path) -> None:
    """Give what is complete its name, and remove what had it before; at each moment one has it."""
    for left in reversed(range(_TRIES)):
        try:
            _put(part, place)
            break
        except OSError as error:
            if not left or error.errno not in _TAKEN or not os.path.lexists(part):
                raise
    sync_folder(place.parent)


def _put(part: Path, place: Path) -> None:
    if not _is_folder(place) and not (_is_folder(part) and os.path.lexists(place)):
        os.replace(part, place)
    elif exchange(part, place):
        remove(part)
    else:
        before = part_of(place, before=True)
        os.rename(place, before)
        try:
            os.rename(part, place)
        except OSError:
            os.rename(before, place)
            raise
        remove(before)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, by Linux's renameat2(2); False if this system cannot."""
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    if function(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk before this returns, where the system can do so."""
    try:
        _sync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


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
        if place is not None and _is_special(place):
            made: AbstractContextManager[BinaryIO] = place.open("wb")
        else:
            made = _remote_file(path) if place is None else _local_file(place)
        with made as file:
            yield file


@contextmanager
def new_folder(path: Any, *, own: Sequence[str] = (), edition: str = "") -> Iterator[OpenFolder]:
    """Write a folder that is there when the block ends, whole, or not; one rank enters this."""
    with explaining_failures(path):
        place = local_path(path)
        if place is None:
            if holds_others(path, own):
                raise _is_another(path, "a folder of checkpoints")
            if own:
                remove_own(path, own)
            with new_edition(path, edition) as folder:
                yield folder
            return
        _make_room(place)
        if _is_special(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if holds_others(place, own):
            raise _is_another(place, "a folder of checkpoints")
        part = part_of(place)
        part.mkdir()
        with _removed_unless_done(part):
            yield OpenFolder(str(part))
            _keep_others(place, part, own)
            _sync_all(part)
            put_in_place(part, place)


@contextmanager
def _local_file(place: Path) -> Iterator[BinaryIO]:
    _make_room(place)
    if _is_folder(place) and not any(_is_own(name) for name in _names(place)):
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


def _keep_others(place: Path, part: Path, own: Sequence[str]) -> None:
    """Give a folder's next checkpoint the files in it that are of none: somebody's notes."""
    if not _is_folder(place):
        return
    for path in place.iterdir():
        if _is_own(path.name, (*own, "*.part")):
            continue
        with suppress(FileNotFoundError):  # somebody has just removed it
            if _is_folder(path):
                shutil.copytree(path, part / path.name, symlinks=True, copy_function=link_or_copy)
            else:
                link_or_copy(path, part / path.name)


def _sync_all(folder: Path) -> None:
    for top, _, names in os.walk(folder):
        for name in names:
            _sync(Path(top) / name, os.O_RDONLY)


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


_WRITTEN = re.compile(r"\.metadata|meta(\.[0-9a-f]{8})?\.pt|checksums.*\.json|.*\.distcp")
_SAVING = "saving"


@contextmanager
def new_edition(path: Any, edition: str = "") -> Iterator[OpenFolder]:
    """Write a remote folder, which is the one before until its index is put."""
    folder = OpenFolder(str(path), edition or uuid4().hex[:8])
    with as_system_errors():
        filesystem, inner = fresh_place(path)
        inner = inner.rstrip("/")
        parent, name = posixpath.split(inner)
        _make(filesystem, parent)
        remove_remote_leftovers(filesystem, parent)
        if filesystem.isfile(inner):
            filesystem.rm_file(inner)
        _make(filesystem, inner)
        saving = posixpath.join(parent, part_of(Path(_SAVING)).name)
        filesystem.pipe_file(saving, f"{folder.edition} {name}".encode())
    try:
        yield folder
    finally:
        with suppress(Exception):  # of no consequence: the next save does it
            _settle(filesystem, inner, folder.edition)
            filesystem.rm_file(saving)


def holds_others(path: Any, own: Sequence[str] = ()) -> bool:
    """Whether a folder holds files, and none of a checkpoint or of these patterns."""
    names = _names(path)
    return bool(names) and not any(_is_own(name, own) for name in names)


def remove_own(path: Any, own: Sequence[str]) -> None:
    """Remove the files of checkpoints and of these patterns from a remote folder, or a file."""
    with as_system_errors():
        filesystem, inner = fresh_place(path)
        if filesystem.isfile(inner):
            filesystem.rm_file(inner)
        for name in _names(path):
            if _is_own(name, own):
                filesystem.rm_file(posixpath.join(inner, name))


def _names(path: Any) -> list[str]:
    filesystem, inner = fresh_place(path)
    return names_in(filesystem, inner) if filesystem.isdir(inner) else []


def _is_own(name: str, own: Sequence[str] = ()) -> bool:
    return bool(_WRITTEN.fullmatch(name)) or any(fnmatch(name, one) for one in own)


def remove_remote(path: Any) -> None:
    """Remove a remote file or folder, the index first: what is left of it is no checkpoint."""
    with as_system_errors():
        filesystem, inner = fresh_place(path)
        index = posixpath.join(inner, INDEX_FILE)
        if filesystem.isfile(index):
            filesystem.rm_file(index)
        if filesystem.exists(inner):
            filesystem.rm(inner, recursive=True)


def remove_remote_leftovers(filesystem: Any, folder: str) -> None:
    """Remove what dead writers have left of folders in a remote folder."""
    for name in filter(is_leftover, names_in(filesystem, folder)):
        saving = posixpath.join(folder, name)
        with suppress(OSError, NotImplementedError, ValueError):
            edition, written = filesystem.cat_file(saving).decode().split(" ", 1)
            inner = posixpath.join(folder, written)
            if not writer_lives(name, partial(_has_changed, filesystem, saving, inner)):
                _settle(filesystem, inner, edition)
                filesystem.rm_file(saving)


def _make(filesystem: Any, folder: str) -> None:
    with suppress(NotImplementedError, FileExistsError):
        filesystem.makedirs(folder, exist_ok=True)


def _has_changed(filesystem: Any, saving: str, inner: str) -> bool:
    """Whether something that is written has changed within an hour, or nobody can tell."""
    places = [saving, *(posixpath.join(inner, name) for name in names_in(filesystem, inner))]
    return changed_lately(filesystem, f"{saving}.clock", places)


def _settle(filesystem: Any, inner: str, edition: str) -> None:
    """Keep of a folder this edition alone if the index names it, and none of it if not."""
    names = list(filter(_WRITTEN.fullmatch, names_in(filesystem, inner)))
    index = posixpath.join(inner, INDEX_FILE)
    if INDEX_FILE in names and edition.encode() in filesystem.cat_file(index):
        own = in_edition(META_FILE, edition)
        if own in names:
            content = filesystem.cat_file(posixpath.join(inner, own))
            filesystem.pipe_file(posixpath.join(inner, META_FILE), content)
        kept = {INDEX_FILE, META_FILE}
        names = [one for one in names if one not in kept and edition_in(one) != edition]
    else:
        names = [one for one in names if edition_in(one) == edition]
    for name in names:
        filesystem.rm_file(posixpath.join(inner, name))
    if not names_in(filesystem, inner):
        with suppress(OSError, NotImplementedError):
            filesystem.rmdir(inner)
