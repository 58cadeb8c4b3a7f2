"""Snapshots that outlive the processes that took them, as files in memory.

    /dev/shm/lightning_shard-1000-fit1-job7/   of this user alone; one for each fit of a script
        000001-rank0-0.snapshot                complete: counts for whoever starts next
        000001-rank0-1.snapshot
        000001-rank0-2.open                    being written, or idle: passed over

torchrun's agents end all workers of a job when one is lost, by SIGKILL in the end, and start them
again on the same host. A buffer is such a file, mapped: what is written into it is there without
another copy. Its name changes, in one step, once it holds a complete snapshot and before it is
written again, so that nobody reads a part of one, whenever the writer was killed.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lightning_shard.checkpoint.host_buffers import SPARE_BYTES, full_buffer, take_fitting
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.errors import CheckpointError, ConfigError

_ROOT = Path("/dev/shm")
_OPEN, _COMPLETE = ".open", ".snapshot"
_UNSAFE = re.compile(r"[^\w.-]")  # in a file's name
_AGENT = re.compile(r"-(\d+)$")
_NUMBER = re.compile(r"(\d{6,})-")


def job_folder(job: str, root: Path | None = None) -> Path:
    """Return the folder of a job on this host, made if need be; nobody else may enter it.

    Args:
        job: The job's name, which its workers have in common over its restarts.
        root: Where the folder lies; in memory when left out.

    Raises:
        ConfigError: There is no shared memory here, or the folder is somebody else's.
    """
    root = _ROOT if root is None else root
    if not root.is_dir():
        raise ConfigError(
            f"Snapshots that outlive the workers need a folder in memory; {root} is not there. "
            f"Give another folder, on a disk if it must be."
        )
    folder = root / f"lightning_shard-{os.getuid()}-{_UNSAFE.sub('_', job)}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is to hold this job's snapshots, got {stat.filemode(found.st_mode)} of user "
            f"{found.st_uid}, expected a folder that user {os.getuid()} alone may enter. Remove "
            f"it, or name the job otherwise."
        )
    return folder


class SharedMemoryBuffers:
    """Buffers of snapshots in a job's folder.

    Args:
        folder: The job's folder, see `job_folder`.
        writer: This process's name, which no other one in the folder and the generation may have.
        generation: The generation in which this process has started; it orders the files.
    """

    def __init__(self, folder: Path, writer: str, generation: int = 0) -> None:
        self._stem = folder / f"{generation:06d}-{_UNSAFE.sub('_', writer)}"
        self._num_made = 0
        self._paths: dict[int, Path] = {}  # by address, without suffix
        self._idle: list[Tensor] = []

    def lend(self, num_bytes: int) -> Tensor:
        """Return a buffer of so many bytes: uint8, 1-D, in host memory.

        Raises:
            CheckpointError: There is no room.
        """
        buffer = take_fitting(self._idle, num_bytes)
        if buffer is None:
            while self._idle:  # of another number of ranks
                self.forget(self._idle.pop())
            path = Path(f"{self._stem}-{self._num_made}{_OPEN}")
            self._num_made += 1
            buffer = _make(path, num_bytes + SPARE_BYTES)
            self._paths[buffer.data_ptr()] = path
        return buffer[:num_bytes]

    def keep(self, data: Tensor) -> None:
        """Let a complete snapshot be found from now on."""
        path = self._paths[data.data_ptr()]
        path.rename(path.with_suffix(_COMPLETE))

    def give_back(self, data: Tensor) -> None:
        """Take a buffer back, to be written again; one from elsewhere is passed over."""
        path = self._paths.get(data.data_ptr())
        if path is None:
            return
        full = path.with_suffix(_COMPLETE)
        if full.exists():
            full.rename(path)
        self._idle.append(full_buffer(data))

    def forget(self, data: Tensor) -> None:
        """Remove a buffer's name; its memory goes with its last user."""
        self._paths.pop(data.data_ptr()).unlink(missing_ok=True)


def load_all(folder: Path) -> list[Snapshot]:
    """Map every complete snapshot in a folder; nothing is copied.

    They stay readable after `clear`, until the last tensor of theirs goes.

    Raises:
        CheckpointError: A file is of another version of this package.
    """
    return [
        Snapshot.read(_map(path, shared=False), is_own=True)
        for path in sorted(folder.glob(f"*{_COMPLETE}"))
    ]


def newest_generation(job: str, root: Path | None = None) -> int:
    """Return the last generation in which a process has left a file in any fit of a job; else 0."""
    root = _ROOT if root is None else root
    folders = root.glob(f"lightning_shard-{os.getuid()}-*-{_UNSAFE.sub('_', job)}")
    names = (path.name for folder in folders for path in folder.iterdir())
    return max((int(found[1]) for found in map(_NUMBER.match, names) if found), default=0)


def clear(folder: Path, before: int | None = None, writer: str | None = None) -> None:
    """Remove a job's files from memory.

    Args:
        folder: The job's folder, see `job_folder`; it goes, too, when nothing is left in it.
        before: Remove only files of processes that have started before this generation.
        writer: Remove the files of this process as well.
    """
    mine = None if writer is None else f"-{_UNSAFE.sub('_', writer)}-"
    for path in [*folder.glob(f"*{_COMPLETE}"), *folder.glob(f"*{_OPEN}")]:
        number = _NUMBER.match(path.name)
        is_old = before is None or (number is not None and int(number[1]) < before)
        if is_old or (mine is not None and mine in path.name):
            path.unlink(missing_ok=True)  # another rank may be at it
    if before is None or writer is not None:
        try:
            folder.rmdir()
        except OSError:
            return  # it holds what is not ours, or another rank has removed it


def remove_orphans(root: Path | None = None) -> None:
    """Remove what this user's jobs have left whose agent has gone: nobody will take it up.

    Args:
        root: Where the jobs' folders lie; a job's name ends with its agent's process id.
    """
    root = _ROOT if root is None else root
    for folder in root.glob(f"lightning_shard-{os.getuid()}-*"):
        agent = _AGENT.search(folder.name)
        if agent is not None and not _is_running(int(agent[1])):
            clear(folder)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _make(path: Path, num_bytes: int) -> Tensor:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # else a full memory is a SIGBUS, later
    except OSError as error:
        path.unlink()
        raise CheckpointError(
            f"No room for a snapshot of {num_bytes} bytes in {path.parent}: {error}. Each rank "
            f"needs five there. Make the memory file system larger (docker: --shm-size), or give "
            f"another folder."
        ) from error
    finally:
        os.close(descriptor)
    return _map(path, shared=True)


def _map(path: Path, *, shared: bool) -> Tensor:
    """Map the bytes of a file; unless shared, what is written there does not reach the file."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)
