"""Membership under torchrun or Ray Train, which end all workers when one is lost and start anew.

    who restarts them    start ──> a worker is lost, or a node waits ──> end all ──> start all
    workers                 train, snapshots into shared memory     ✗        map them, go on

Snapshots outlive the processes that took them, as files in memory:

    /dev/shm/lightning_shard-1000-fit1-job7/   of this user alone; one for each fit of a script
        000001-rank0-0.snapshot                complete: counts for whoever starts next
        000001-rank0-2.open                    being written, or idle: passed over

A buffer is such a file, mapped. Its name changes, in one step, once it holds a complete snapshot
and before it is written again, so that nobody reads a part of one, whenever the writer was killed.
"""

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.authentication.token import make_private_folder
from lightning_shard.backends.base import Backend
from lightning_shard.backends.objects import gather_objects
from lightning_shard.checkpoint.host_buffers import SPARE_BYTES, full_buffer, take_fitting
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.elastic.membership.generation import Generation, Membership
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError

_ROOT = Path("/dev/shm")
_OPEN, _COMPLETE = ".open", ".snapshot"
_UNSAFE = re.compile(r"[^\w.-]")  # in a file's name
_AGENT = re.compile(r"-(\d+)$")
_NUMBER = re.compile(r"(\d{6,})-")


def job_folder(job: str, root: Path | None = None) -> Path:
    """Return the folder of a job on this host, made if need be; nobody else may enter it."""
    root = root or _ROOT
    if not root.is_dir():
        raise ConfigError(
            f"Snapshots that outlive the workers need a folder in memory; {root} is not there. "
            f"Give another folder, on a disk if it must be."
        )
    folder = root / f"lightning_shard-{os.getuid()}-{_UNSAFE.sub('_', job)}"
    make_private_folder(folder, "this job's snapshots", "name the job otherwise")
    return folder


class SharedMemoryBuffers:
    """Buffers of snapshots in a job's folder."""

    def __init__(self, folder: Path, writer: str, generation: int = 0) -> None:
        self._stem = folder / f"{generation:06d}-{_UNSAFE.sub('_', writer)}"
        self._num_made = 0
        self._paths: dict[int, Path] = {}  # by address, without suffix
        self._idle: list[Tensor] = []

    def lend(self, num_bytes: int) -> Tensor:
        """Return a buffer of so many bytes: uint8, 1-D, in host memory."""
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
    """Map every complete snapshot in a folder; they stay readable after `clear`."""
    return [
        Snapshot.read(_map(path, shared=False), is_own=True)
        for path in sorted(folder.glob(f"*{_COMPLETE}"))
    ]


def newest_generation(job: str, root: Path | None = None) -> int:
    """Return the last generation in which a process has left a file in any fit of a job; else 0."""
    folders = (root or _ROOT).glob(f"lightning_shard-{os.getuid()}-*-{_UNSAFE.sub('_', job)}")
    names = (path.name for folder in folders for path in folder.iterdir())
    return max((int(found[1]) for found in map(_NUMBER.match, names) if found), default=0)


def clear(folder: Path, before: int | None = None, writer: str | None = None) -> None:
    """Remove a job's files from memory."""
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
    """Remove what this user's jobs have left whose agent has gone: nobody will take it up."""
    for folder in (root or _ROOT).glob(f"lightning_shard-{os.getuid()}-*"):
        agent = _AGENT.search(folder.name)
        if agent is not None and not _is_running(int(agent[1])):
            clear(folder)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
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


@dataclass(frozen=True, kw_only=True)
class Restarted:
    """One worker of a job that something starts anew as a whole."""

    by: str
    job: str
    rank: int
    world_size: int
    limit: str
    is_killed: bool = False


class RestartMembership(Membership):
    """One worker's part in a job that is restarted."""

    is_wanted = False  # who restarts the workers looks for newcomers
    is_leaving = False

    def __init__(
        self, backend: Backend, device: torch.device, timeout: timedelta, worker: Restarted
    ) -> None:
        self._worker = worker
        self._make_groups = partial(
            backend.init_process_group,
            rank=worker.rank,
            world_size=worker.world_size,
            device=device,
            timeout=timeout,
        )
        remove_orphans()
        self._folders: list[Path] = []  # of the fits of this process
        self._generation: Generation | None = None
        self._is_new = True
        self.me = f"rank{worker.rank}"
        self.first_size, self.started_by = worker.world_size, worker.by

    def begin(self) -> Generation:
        """Meet the other workers."""
        self._make_groups()
        number = max(self._of_all_ranks(newest_generation(self._worker.job))) + 1
        members = tuple(f"rank{rank}" for rank in range(self.first_size))
        self._generation = Generation(number=number, members=members, me=self.me)
        return self._generation

    def begin_fit(self) -> None:
        """Find what is left of the next fit of the script, whose earlier ones it comes to first."""
        self._folders.append(job_folder(f"fit{len(self._folders) + 1}-{self._worker.job}"))
        self.held = load_all(self._folders[-1])
        self._is_new = True
        self.has_past = any(self._of_all_ranks(bool(self.held)))

    def _of_all_ranks(self, value: int) -> list[int]:
        world = dist.group.WORLD
        assert world is not None  # `begin` has made it
        return gather_objects(world, value)

    def make_buffers(self) -> SharedMemoryBuffers:
        """Return where this rank's snapshots of the present fit are written."""
        assert self._generation is not None
        return SharedMemoryBuffers(self._folders[-1], self.me, self._generation.number)

    def following(self, error: BaseException | None = None) -> Generation:
        """Return the one generation that this process lives in, once."""
        assert self._generation is not None
        if not self._is_new:
            raise RankFailedError(
                f"Rank {self._worker.rank} of {self.first_size} ends because a rank was lost or "
                f"has failed; {self._worker.by} starts all of them again, which go on from their "
                f"snapshots. If it does not, raise its {self._worker.limit}."
            ) from error
        return self._generation

    def init_groups(
        self, generation: Generation, backend: Backend, device: torch.device, timeout: timedelta
    ) -> None:
        """Do nothing: `begin` has made them."""

    def drop_groups(self) -> None:
        """Do nothing: they end with the process."""

    def forget_past(self) -> None:
        """Remove what predecessors have left here, now that there is something newer everywhere."""
        if self._is_new and self._generation is not None:
            self._is_new = False
            self.held = []
            clear(self._folders[-1], before=self._generation.number)

    def end_fit(self) -> None:
        """Remove this process's snapshots where nobody hears of the end of the script."""
        if self._worker.is_killed:
            self.leave()

    def leave(self) -> None:
        """Remove this process's snapshots: the script has ended."""
        assert self._generation is not None
        for folder in self._folders:
            clear(folder, before=self._generation.number, writer=self.me)
