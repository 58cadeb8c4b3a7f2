"""Which checkpoints there are, wherever they lie, and when they were complete.

A file counts when it was written, a folder when its index was: one without an index is none. On an
object store nothing else tells a folder that somebody has begun from one that is complete.
"""

import posixpath
from collections.abc import Iterable
from typing import Any

from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.checkpoint.files.parts import is_leftover
from lightning_shard.checkpoint.files.places import (
    fresh_place,
    inside,
    local_path,
    names_in,
    written_at,
)


def checkpoints_in(folder: Any, suffix: str, prefix: str = "") -> list[str]:
    """Return the paths of what is in a folder and has a checkpoint's name, complete or not.

    Args:
        folder: Local, or any path of fsspec's; it need not be there.
        suffix: What the names end in, such as ".ckpt".
        prefix: What they begin with.
    """
    names = [name for name in names_in(*fresh_place(folder)) if not is_leftover(name)]
    return [inside(folder, one) for one in names if one.startswith(prefix) and one.endswith(suffix)]


def completed_at(path: Any) -> float | None:
    """Return when a checkpoint was complete, in seconds since 1970 by its filesystem's clock.

    Returns:
        None where there is none, or none that is complete; 0.0 where nobody tells the time.
    """
    filesystem, inner = fresh_place(path)
    if not filesystem.exists(inner):
        return None
    if filesystem.isdir(inner):
        inner = posixpath.join(inner, INDEX_FILE)
        if not filesystem.isfile(inner):
            return None
    return written_at(filesystem, inner) or 0.0


def by_age(paths: Iterable[Any]) -> list[str]:
    """Return those that are complete, the oldest first."""
    times = {str(path): completed_at(path) for path in paths}
    known = {path: time for path, time in times.items() if time is not None}
    return sorted(known, key=lambda path: known[path])


def is_remote(path: Any) -> bool:
    """Whether a path is behind one of fsspec's filesystems, and not on this machine's."""
    return local_path(path) is None
