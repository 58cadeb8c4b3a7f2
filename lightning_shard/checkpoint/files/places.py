"""Where a path lies: on this machine's filesystems, or behind one of fsspec's; and what is there.

    /run/last.ckpt, file:///run/last.ckpt       local_path says where
    s3://bucket/last.ckpt, memory://last.ckpt   remote_place says behind which filesystem

Other ranks write there, too: what fsspec remembers of a listing is forgotten before anybody looks.
"""

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

_WEB = ("http://", "https://")


def local_path(path: Any) -> Path | None:
    """Return the path on this machine's filesystems; None for a remote one."""
    text = os.fspath(path)
    if "://" not in text and "::" not in text:
        return Path(text)
    filesystem, inner = url_to_fs(text)
    return Path(inner) if isinstance(filesystem, LocalFileSystem) else None


def remote_place(path: Any) -> tuple[Any, str]:
    """Return fsspec's filesystem of a path, and the path there."""
    filesystem, inner = url_to_fs(os.fspath(path))
    return filesystem, inner


def opened(path: Any, mode: str = "rb") -> Any:
    """Open a file, local or remote."""
    filesystem, inner = remote_place(path)
    return filesystem.open(inner, mode)


def inside(folder: Any, name: str) -> str:
    """Return the path of something in a folder, local or remote."""
    text: str = os.fspath(folder)
    return f"{text.rstrip('/')}/{name}"


def is_on_the_web(path: Any) -> bool:
    """Whether a path is one of http, where there are files alone."""
    return str(os.fspath(path)).startswith(_WEB)


def is_folder(path: Any) -> bool:
    """Whether there is a folder, complete or not."""
    place = local_path(path)
    if place is not None:
        return place.is_dir()
    if is_on_the_web(path):
        return False
    filesystem, inner = fresh_place(path)
    return bool(filesystem.isdir(inner))


def is_file(path: Any) -> bool:
    """Whether there is a file."""
    filesystem, inner = fresh_place(path)
    return bool(filesystem.isfile(inner))


def fresh_place(path: Any) -> tuple[Any, str]:
    """Return what `remote_place` does, with nothing remembered of what was there before."""
    filesystem, inner = remote_place(path)
    forget(filesystem, inner)
    return filesystem, inner


def forget(filesystem: Any, inner: str) -> None:
    """Have a filesystem look again at a path there, and at the folder that it lies in."""
    filesystem.invalidate_cache(posixpath.dirname(inner))
    filesystem.invalidate_cache(inner)


def names_in(filesystem: Any, folder: str) -> list[str]:
    """Return the names of what is in a folder of a filesystem; none where there is no folder."""
    forget(filesystem, folder)
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [str(one).rstrip("/") for one in filesystem.ls(folder, detail=False)]
        own = folder.rstrip("/")  # some stores list it, too
        return sorted(posixpath.basename(one) for one in found if one != own)
    return []


def file_sizes(path: Any) -> dict[str, int]:
    """Return the bytes of each file of a folder, by its name, or of a file, under its own."""
    filesystem, inner = remote_place(path)
    if not filesystem.isdir(inner):
        return {inner.rpartition("/")[2]: int(filesystem.size(inner))}
    entries = filesystem.ls(inner, detail=True)
    return {
        str(one["name"]).rstrip("/").rpartition("/")[2]: int(one["size"])
        for one in entries
        if one["type"] == "file"
    }


def written_at(filesystem: Any, inner: str) -> float | None:
    """Return when a file was written, in seconds since 1970; None where nobody can tell."""
    forget(filesystem, inner)
    for told in (filesystem.modified, filesystem.created):
        with suppress(NotImplementedError, OSError, KeyError, AttributeError, TypeError):
            return float(told(inner).timestamp())
    return None


@contextmanager
def as_system_errors() -> Iterator[None]:
    """Raise as errors of the operating system what a remote filesystem raises of its own."""
    try:
        yield
    except (OSError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
