"""What makes writing atomic: rename, exchange of two names, fsync of files and folders."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.files.parts import part_of, remove

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_TAKEN = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR}
_TRIES = 20
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR}


def put_in_place(part: Path, place: Path) -> None:
    """Give what is complete its name, and remove what had it before.

    At each moment one of both has the name, whole. Only on systems that cannot exchange names is
    there a moment in which a folder that had it is beside its place, as `parts` tells. Where
    another process gives or takes the same name meanwhile, the last one has it.
    """
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
    """Exchange the names of two files or folders in one step.

    Returns:
        Whether this system can; nothing has changed if not.

    Source:
        renameat2(2) of Linux, which Python does not wrap.
    """
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


def sync_file(path: Path) -> None:
    """Have the elements of a file on the disk before this returns."""
    _sync(path, os.O_RDONLY)


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
