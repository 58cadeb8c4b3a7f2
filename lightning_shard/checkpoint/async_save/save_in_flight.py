"""One save, from the copy of what each rank has until its folders are in their places.

    writing    each rank's thread writes its file, and sums it up
    placing    rank 0's thread writes index and checksums, and gives the folder its name
    complete

Ranks go from one phase to the next together, at the boundary of a step at which each rank's thread
has finished. A thread that fails takes all of them along, and the folder is removed. A second
folder of the same moment, as `ModelCheckpoint(save_last=True)` asks for, comes along.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.async_save.save_plans import SavePlans
from lightning_shard.checkpoint.async_save.staged_items import StagedItems
from lightning_shard.checkpoint.async_save.unfinished_folder import UnfinishedFolder, explained
from lightning_shard.checkpoint.files.open_folder import on_one_filesystem
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.errors import CheckpointError

FAILED, WORKING, FINISHED = -1, 0, 1
_POLL_SECONDS = 0.1


class SaveInFlight:
    """A checkpoint that is copied, and then written; each rank must make one, with the same path.

    Args:
        path: Where the folder is to be.
        state: As for `write_folder`; it is copied here.
        meta: As for `write_folder`; it is pickled here.
        collectives: Group of all ranks; None where this process is alone.
        buffers: Lends the host memory of the copy.
        plans: As for `UnfinishedFolder`.

    Raises:
        CheckpointError: Some rank could not begin.
    """

    def __init__(
        self,
        path: Any,
        state: Mapping[str, Any],
        meta: Mapping[str, Any] | None,
        collectives: Collectives | None,
        buffers: HostBuffers,
        plans: SavePlans,
    ) -> None:
        self._collectives = None if collectives is None or collectives.size == 1 else collectives
        self._rank = 0 if self._collectives is None else self._collectives.rank

        def staging(plan: SavePlan, planner: SavePlanner) -> StagedItems:
            return StagedItems(plan.items, planner.resolve_data, buffers)

        first = UnfinishedFolder(path, state, meta, self._collectives, plans, staging)
        assert first.writer.staged is not None
        self.staged = first.writer.staged
        self._folders, self._plans = [first], plans
        self._afterwards: deque[Callable[[], None]] = deque()
        self._is_placing = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-save")
        self._jobs: list[Future[None]] = []
        self.is_started = False

    def start(self) -> None:
        """Let the thread write, once every rank is known to have its copy."""
        self.is_started = True
        self._jobs.append(self._executor.submit(self._folders[0].write))

    @property
    def paths(self) -> list[Any]:
        """Where its folders are to be."""
        return [folder.path for folder in self._folders]

    def join(self, path: Any, state: Mapping[str, Any], meta: Mapping[str, Any] | None) -> bool:
        """Have a second folder of the same elements written along; each rank must call.

        Args:
            path: Where it is to be.
            state: As for `write_folder`; it is compared with what was copied.
            meta: As for `write_folder`, which may differ.

        Returns:
            Whether it will be. If not, some rank has other elements than before.

        Raises:
            CheckpointError: Some rank could not begin.
        """
        if self._is_placing or os.fspath(path) in map(os.fspath, self.paths):
            return False
        if not on_one_filesystem(path, self.paths[0]):
            return False

        def staging(plan: SavePlan, planner: SavePlanner) -> StagedItems | None:
            same = self.staged.holds(plan.items, planner.resolve_data)
            return self.staged if same else None

        first = self._folders[0]
        folder = UnfinishedFolder(path, state, meta, self._collectives, self._plans, staging)
        if not all(self._gather(folder.has_copy)):
            folder.discard()
            return False
        self._folders.append(folder)
        self._jobs.append(self._executor.submit(folder.link, first))
        return True

    @property
    def progress(self) -> int:
        """Whether this rank's thread has FAILED, is WORKING or has FINISHED its phase."""
        if any(job.done() and job.exception() is not None for job in self._jobs):
            return FAILED
        return FINISHED if all(job.done() for job in self._jobs) else WORKING

    def then(self, action: Callable[[], None]) -> None:
        """Have rank 0 do something once the folder is in its place, and never if that fails."""
        if self._rank == 0:
            self._afterwards.append(action)

    def advance(self, *, has_failed: bool) -> bool:
        """Go to the next phase, once all ranks are ready or one has failed; each rank must call.

        Args:
            has_failed: Whether some rank's thread has failed.

        Returns:
            Whether the checkpoint is complete.

        Raises:
            CheckpointError: Some rank has failed; the folder has been removed.
        """
        if has_failed:
            self.staged.cancelled.set()
        told = self._gather((self._wait(), [folder.written for folder in self._folders]))
        failed = {rank: one for rank, (one, _) in enumerate(told) if one is not None}
        if failed:
            self.discard()
            raise CheckpointError(explained(failed))
        if self._is_placing:
            self._end()
            return True
        self.staged.give_back()
        self._is_placing = True
        self._jobs = []
        if self._rank == 0:
            self._jobs = [self._executor.submit(self._put_in_place, [own for _, own in told])]
        return False

    def finish(self, tell: Callable[[int], None] = lambda _: None) -> None:
        """Wait until the checkpoint is complete; each rank must call.

        Args:
            tell: Is told at times how many bytes of this rank's are written.

        Raises:
            CheckpointError: Some rank has failed; the folder has been removed.
        """
        while True:
            while wait(self._jobs, _POLL_SECONDS).not_done:
                tell(self.staged.num_written)
            tell(self.staged.num_written)
            if self.advance(has_failed=False):
                return

    def discard(self) -> None:
        """Give the save up, and remove what this rank has written of it; no other rank is asked."""
        self.staged.cancelled.set()
        self._wait()
        self._afterwards.clear()
        for folder in self._folders:
            folder.discard()
        self._end()

    def _end(self) -> None:
        self._do_afterwards()
        self.staged.give_back()
        self._executor.shutdown(wait=False)

    def _put_in_place(self, written: list[list[Any]]) -> None:
        """Complete the folders; runs in rank 0's thread."""
        for number, folder in enumerate(self._folders):
            folder.complete([each[number] for each in written])
        self._do_afterwards()

    def _do_afterwards(self) -> None:
        while self._afterwards:
            self._afterwards.popleft()()

    def _wait(self) -> str | None:
        """Wait for this rank's thread, and return why it has failed; None where it has not."""
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        if not errors:
            return None
        first = errors[0]
        return str(first) if isinstance(first, CheckpointError) else repr(first)

    def _gather(self, own: Any) -> list[Any]:
        return [own] if self._collectives is None else self._collectives.all_gather_object(own)
