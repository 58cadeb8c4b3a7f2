"""Membership under torchrun or Ray Train, which end all workers when one is lost and start anew.

    who restarts them    start ──> a worker is lost, or a node waits ──> end all ──> start all
    workers                 train, snapshots into shared memory     ✗        map them, go on

Who takes part torchrun's agents decide, or Ray's controller by its scaling policy; here a process
learns who it is, and what its predecessors on this host have left.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_shard.backends.base import Backend
from lightning_shard.backends.objects import gather_objects
from lightning_shard.elastic.generation import Generation, Membership
from lightning_shard.elastic.shared_memory import (
    SharedMemoryBuffers,
    clear,
    job_folder,
    load_all,
    newest_generation,
    remove_orphans,
)
from lightning_shard.errors import RankFailedError


@dataclass(frozen=True, kw_only=True)
class Restarted:
    """One worker of a job that something starts anew as a whole.

    Attributes:
        by: Name of what does so.
        job: The job's name, which its workers on a host have in common over its restarts.
        rank: Rank of the worker this time.
        world_size: Number of workers this time.
        limit: The option that says how often it does so.
        is_killed: Whether the process ends without a word when the script has ended.
    """

    by: str
    job: str
    rank: int
    world_size: int
    limit: str
    is_killed: bool = False


class RestartMembership(Membership):
    """One worker's part in a job that is restarted.

    Args:
        backend: The backend of the groups.
        device: This rank's device.
        timeout: How long ranks wait for each other in a group.
        worker: Which worker this is.

    Attributes:
        me: Name of this rank among the members.
        first_size: Number of ranks with which the workers were started this time.
        held: The snapshots that its predecessors on this host have left of the present fit.
        has_past: Whether any rank's predecessors have left some.
    """

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
        """Find what is left of the next fit of the script; each rank must call.

        Fits before it are not forgotten: started again, the script comes to them first.
        """
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
        """Return the one generation that this process lives in, once.

        Raises:
            RankFailedError: It has ended: this process has to end, too.
        """
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
