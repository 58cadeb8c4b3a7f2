"""Folders of checkpoints on object stores, where nothing is renamed and folders are but names.

    .saving.ls-….part         who writes, and which folder    beside it, first
    last.ckpt/meta.….pt       the files of a new edition      beside those of the one before
    last.ckpt/.metadata       names the new edition           in one step: from here on it counts
    last.ckpt/meta.pt         a copy, for other readers
                              the edition before goes, and who has written

So a checkpoint that is replaced is there until its successor is; a folder without an index is
none. What a killed writer has left goes with the next save beside it.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_shard.checkpoint.files.open_folder import (
    INDEX_FILE,
    META_FILE,
    OpenFolder,
    edition_in,
    in_edition,
)
from lightning_shard.checkpoint.files.parts import (
    SILENT_SECONDS,
    is_leftover,
    part_of,
    writer_lives,
)
from lightning_shard.checkpoint.files.places import (
    as_system_errors,
    fresh_place,
    names_in,
    written_at,
)

_OF_CHECKPOINTS = re.compile(r"\.metadata|meta(\.[0-9a-f]{8})?\.pt|checksums.*\.json|.*\.distcp")
_SAVING = "saving"


@contextmanager
def new_edition(path: Any) -> Iterator[OpenFolder]:
    """Write a remote folder, which is the one before until its index is put.

    Yields:
        The folder to write into. Its index comes last.

    Raises:
        OSError: The filesystem's reason.
    """
    folder = OpenFolder(str(path), uuid4().hex[:8])
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
    """Whether a remote folder holds files, and none of a checkpoint or of these patterns."""
    names = _names(path)
    return bool(names) and not any(_is_own(name, own) for name in names)


def remove_own(path: Any, own: Sequence[str]) -> None:
    """Remove the files of checkpoints and of these patterns from a remote folder, or a file.

    Raises:
        OSError: The filesystem's reason.
    """
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


def _is_own(name: str, own: Sequence[str]) -> bool:
    return bool(_OF_CHECKPOINTS.fullmatch(name)) or any(fnmatch(name, one) for one in own)


def remove_remote(path: Any) -> None:
    """Remove a remote file or folder, a folder's index first: what is left of it is no checkpoint.

    Raises:
        OSError: The filesystem's reason.
    """
    with as_system_errors():
        filesystem, inner = fresh_place(path)
        index = posixpath.join(inner, INDEX_FILE)
        if filesystem.isfile(index):
            filesystem.rm_file(index)
        if filesystem.exists(inner):
            filesystem.rm(inner, recursive=True)


def remove_remote_leftovers(filesystem: Any, folder: str) -> None:
    """Remove what dead writers have left of folders in a remote folder.

    Args:
        filesystem: One of fsspec's filesystems.
        folder: Path of the folder there.
    """
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
    probe = f"{saving}.clock"
    filesystem.pipe_file(probe, b"now")
    now = written_at(filesystem, probe)
    filesystem.rm_file(probe)
    names = names_in(filesystem, inner)
    places = [saving, *(posixpath.join(inner, name) for name in names)]
    times = [written_at(filesystem, one) for one in places]
    return now is None or any(one is None or now - one < SILENT_SECONDS for one in times)


def _settle(filesystem: Any, inner: str, edition: str) -> None:
    """Keep of a folder this edition alone if the index names it, and none of it if not."""
    names = list(filter(_OF_CHECKPOINTS.fullmatch, names_in(filesystem, inner)))
    index = posixpath.join(inner, INDEX_FILE)
    if INDEX_FILE in names and edition.encode() in filesystem.cat_file(index):
        own = in_edition(META_FILE, edition)
        if own in names:
            _copy(filesystem, posixpath.join(inner, own), posixpath.join(inner, META_FILE))
        kept = {INDEX_FILE, META_FILE}
        names = [one for one in names if one not in kept and edition_in(one) != edition]
    else:
        names = [one for one in names if edition_in(one) == edition]
    for name in names:
        filesystem.rm_file(posixpath.join(inner, name))
    if not names_in(filesystem, inner):
        with suppress(OSError, NotImplementedError):
            filesystem.rmdir(inner)


def _copy(filesystem: Any, source: str, target: str) -> None:
    filesystem.pipe_file(target, filesystem.cat_file(source))
