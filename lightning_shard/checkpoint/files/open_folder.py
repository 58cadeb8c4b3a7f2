"""A folder that all ranks write into, before it is complete: where each of its files goes.

local     .last.ckpt.ls-….part/meta.pt       the whole folder gets its name at the end
remote    last.ckpt/meta.5e1f0c2a.pt         files of an edition; the index, put last, in one
          last.ckpt/__0_0.5e1f0c2a.distcp    step, names them: until then the edition before
          last.ckpt/.metadata                is the checkpoint
"""

import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import override

from lightning_shard.checkpoint.files.disk_file import DiskFile
from lightning_shard.checkpoint.files.places import (
    as_system_errors,
    inside,
    local_path,
    remote_place,
)

INDEX_FILE = ".metadata"  # of torch.distributed.checkpoint, written last
META_FILE = "meta.pt"  # as Lightning's own strategy calls it, too
_EDITION = re.compile(r".*\.(?P<edition>[0-9a-f]{8})\.\w+", re.DOTALL)


class RemoteFile(io.RawIOBase):
    """A new object behind one of fsspec's filesystems.

    Args:
        filesystem: One of fsspec's filesystems.
        inner: Path of the object there.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, filesystem: Any, inner: str) -> None:
        self._num_bytes = 0
        self._file: Any = None  # `close` is called of what could not be made, too
        with as_system_errors():
            self._file = filesystem.open(inner, "wb")

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._num_bytes

    @override
    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else b""
        with as_system_errors():
            self._file.write(view)
        self._num_bytes += len(view)
        return len(view)

    def finish(self) -> None:
        """Wait until the object is there.

        Raises:
            OSError: It has not arrived.
        """
        with as_system_errors():
            self._file.close()
        self._file = None

    @override
    def close(self) -> None:
        """Let go of the object, whose beginning may be there; no index names it."""
        if not self.closed and self._file is not None:
            with suppress(Exception):
                self._file.close()
        super().close()


WrittenFile: TypeAlias = DiskFile | RemoteFile
"""A file that is written from its beginning to its end."""


@contextmanager
def put(filesystem: Any, inner: str) -> Iterator[RemoteFile]:
    """Write an object that is there when the block ends, whole, and not at all if it raises.

    What had its name is there until then, where the filesystem's transactions are what they say.

    Args:
        filesystem: One of fsspec's filesystems.
        inner: Path of the object there.

    Raises:
        OSError: It has not arrived.
    """
    with as_system_errors():
        transaction = filesystem.transaction
        transaction.start()
    try:
        with closing(RemoteFile(filesystem, inner)) as file:
            yield file
            file.finish()
    except BaseException:
        with suppress(Exception):
            transaction.complete(commit=False)
        raise
    with as_system_errors():
        transaction.complete(commit=True)


@dataclass(frozen=True)
class OpenFolder:
    """A folder that is being written; ranks tell it to each other.

    Attributes:
        path: Local, or any path of fsspec's.
        edition: Stands in the names of remote files: eight hexadecimal digits; "" in local ones.
    """

    path: str
    edition: str = ""

    def __fspath__(self) -> str:
        """Return the path to write into."""
        return self.path

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's filesystems."""
        return local_path(self.path) is not None

    def named(self, name: str) -> str:
        """Return the name that a file has in this edition, "meta.5e1f0c2a.pt" for "meta.pt"."""
        return in_edition(name, self.edition)

    def create(self, name: str) -> WrittenFile:
        """Open a new file of a name of this edition, as `named` gives it."""
        path = inside(self.path, name)
        place = local_path(path)
        return RemoteFile(*remote_place(path)) if place is None else DiskFile(place)

    def write_index(self, content: bytes) -> None:
        """Write the index, which is there whole or not at all, and makes a remote folder complete.

        Raises:
            OSError: It has not been stored.
        """
        path = inside(self.path, INDEX_FILE)
        if self.is_local:
            with closing(self.create(INDEX_FILE)) as file:
                file.write(content)
                file.finish()
        else:
            with put(*remote_place(path)) as remote:
                remote.write(content)

    def take_over(self, other: "OpenFolder", names: Iterable[str]) -> dict[str, str]:
        """Give files of another folder, which is being written, names here, too.

        Args:
            other: A folder on the same filesystem, see `on_one_filesystem`.
            names: The files' names there.

        Returns:
            By name there, the name here.
        """
        taken = {name: self.named(name.replace(f".{other.edition}.", ".")) for name in names}
        for name, own in taken.items():
            source, target = inside(other.path, name), inside(self.path, own)
            if self.is_local:
                link_or_copy(source, target)
                continue
            with as_system_errors():
                filesystem, inner = remote_place(target)
                filesystem.cp_file(remote_place(source)[1], inner)
        return taken


def on_one_filesystem(one: Any, other: Any) -> bool:
    """Whether one client, or this machine, has both paths."""
    if local_path(one) is not None or local_path(other) is not None:
        return local_path(one) is not None and local_path(other) is not None
    return bool(remote_place(one)[0] == remote_place(other)[0])


def in_edition(name: str, edition: str) -> str:
    """Return the name of a file in an edition; as it is where there is none."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{edition}{dot}{suffix}" if edition else name


def edition_in(name: str) -> str:
    """Return the edition in the name of a file; "" where there is none."""
    found = _EDITION.fullmatch(name)
    return found["edition"] if found else ""


def editions_in(names: Iterable[str]) -> set[str]:
    """Return the editions in the names of files, "" among them where one has none."""
    return {edition_in(name) for name in names}


def link_or_copy(path: Any, name: Any) -> None:
    """Give a file a second name, or its copy where the filesystem has no such files."""
    try:
        os.link(path, name, follow_symlinks=False)
    except OSError:
        shutil.copyfile(path, name, follow_symlinks=False)
