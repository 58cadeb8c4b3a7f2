"""What is complete; names of what is not yet, and what becomes of it when its writer has died.

    .last.ckpt.ls-1f0c…-4711-81734-0.part         being written; whoever was killed has left it
    .last.ckpt.ls-1f0c…-4711-81734-1.before.part  the last checkpoint, while the next takes its
               │      │    │     │                 place on a system that cannot exchange folders
               │      │    │     └ number in the process
               │      │    └ when the process began
               │      └ process
               └ host, boot and process namespace

Nothing that looks for `*.ckpt` finds such names. A writer in the same namespace is known to live or
not. One elsewhere counts as dead when nothing of what it writes has changed for an hour, by the
filesystem's own clock. A folder is complete when its index was written.
"""

import hashlib
import os
import posixpath
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.checkpoint.files.places import (
    fresh_place,
    inside,
    local_path,
    names_in,
    remote_place,
    written_at,
)

_NAME = re.compile(
    r"\.(?P<name>.*)\.ls-(?P<home>[0-9a-f]{16})-(?P<pid>\d+)-(?P<began>\d+)-\d+"
    r"(?P<before>\.before)?\.part",
    re.DOTALL,
)
_LONGEST_NAME = 150  # bytes: what a filesystem allows is 255, and the rest of the name takes some
SILENT_SECONDS = 3600.0
_numbers = count()


def part_of(path: Path, *, before: bool = False) -> Path:
    """Return a new name beside `path` for what will take its place, or has had it before."""
    shown = os.fsencode(path.name)[:_LONGEST_NAME].decode(errors="ignore")
    writer = f"ls-{home()}-{os.getpid()}-{_began(os.getpid())}-{next(_numbers)}"
    return path.with_name(f".{shown}.{writer}{'.before' if before else ''}.part")


def is_leftover(path: str | os.PathLike[str]) -> bool:
    """Whether a path has the name of something incomplete, which is no checkpoint."""
    return _NAME.fullmatch(Path(path).name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what dead writers have left in a folder, or put it back where no successor came."""
    for path in _leftovers(folder):
        found = _NAME.fullmatch(path.name)
        if found is None or writer_lives(path.name, partial(_changed, path, folder)):
            continue
        place = path.with_name(found["name"])
        if found["before"] and not os.path.lexists(place):
            path.rename(place)
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, as far as that is possible.

    A folder loses its name first: a part of it, if this process is killed meanwhile, must not be
    taken for a checkpoint. The next save removes it then.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path if is_leftover(path) else _set_aside(path), ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return  # of no consequence: the next save tries again


def _set_aside(path: Path) -> Path:
    aside = part_of(path)
    try:
        return path.rename(aside)
    except OSError:  # of a folder above that is not ours
        with suppress(OSError):
            (path / INDEX_FILE).unlink(missing_ok=True)
        return path


def _leftovers(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(one.path) for one in entries if one.name.endswith(".part")]
    except OSError:
        return []


def writer_lives(name: str, has_changed: Callable[[], bool]) -> bool:
    """Whether a leftover's writer may still write it, by `has_changed` where none can be asked."""
    found = _NAME.fullmatch(name)
    can_tell = _began(os.getpid()) > 0
    if found is None or found["home"] != home() or not can_tell:
        return has_changed()
    pid = int(found["pid"])
    return pid == os.getpid() or 0 < _began(pid) == int(found["began"])


def changed_lately(filesystem: Any, probe: str, places: Iterable[str]) -> bool:
    """Whether something has changed within an hour by the filesystem's clock, or may have."""
    try:
        filesystem.pipe_file(probe, b"now")
        now = written_at(filesystem, probe)
        filesystem.rm_file(probe)
    except OSError:
        return True
    times = [written_at(filesystem, one) for one in places]
    return now is None or any(one is None or now - one < SILENT_SECONDS for one in times)


def _changed(path: Path, folder: Path) -> bool:
    """Whether something of a leftover has changed within the last hour."""
    filesystem, inner = remote_place(path)
    probe = str(part_of(folder / "clock"))
    return changed_lately(filesystem, probe, [inner, *filesystem.find(inner)])


@cache
def home() -> str:
    """Return what tells where numbers of processes mean the same: a booted host, or a container."""
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    told = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _began(pid: int) -> int:
    """When a process began, in ticks since the boot; 0 if there is none, or nobody says."""
    told = _read(Path(f"/proc/{pid}/stat"))
    fields = told.rpartition(")")[2].split()
    is_gone = not fields or fields[0] in "ZX"
    return 0 if is_gone else int(fields[19])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def checkpoints_in(folder: Any, suffix: str, prefix: str = "") -> list[str]:
    """Return the paths of what is in a folder, if any, and has a checkpoint's name."""
    names = [name for name in names_in(*fresh_place(folder)) if not is_leftover(name)]
    return [inside(folder, one) for one in names if one.startswith(prefix) and one.endswith(suffix)]


def completed_at(path: Any) -> float | None:
    """Return when a checkpoint was complete; None if it is not, 0.0 where nobody tells the time."""
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
