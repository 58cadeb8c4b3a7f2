"""Where a path lies: on this machine's filesystems, or behind one of fsspec's."""

import os
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]


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


def inside(folder: Any, name: str) -> str:
    """Return the path of something in a folder, local or remote."""
    text: str = os.fspath(folder)
    return f"{text.rstrip('/')}/{name}"
