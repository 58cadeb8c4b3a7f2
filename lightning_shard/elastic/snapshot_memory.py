"""A rank's memory of the last boundaries, over generations.

sharded      every `snapshot_every` steps a snapshot, which its buddy gets as well
replicated   the same without a buddy; and between a boundary and the next update the parameters
             and the optimizer state themselves *are* that boundary's, so that nothing is lost:
             of each step only the progress is noted, and the rest is taken when peers are lost
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.registry import get_backend
from lightning_shard.checkpoint.host_buffers import HostBuffers, SnapshotBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.elastic.buddies import BuddyRing
from lightning_shard.elastic.generation import Generation
from lightning_shard.elastic.progress import Progress, flags_of
from lightning_shard.elastic.reconfigurable import ElasticFit


class SnapshotMemory:
    """One rank's snapshots and its buddy's.

    Args:
        fit: Has the engine, the optimizers and the Trainer whose state is remembered.
        buffers: Where snapshots lie.
        held: What predecessors of this process have left.

    Attributes:
        held: Snapshots to go on from, when a generation has ended.
    """

    def __init__(
        self, fit: ElasticFit, buffers: SnapshotBuffers, held: Sequence[Snapshot] = ()
    ) -> None:
        self.held = [*held]
        self._fit = fit
        self._buffers = buffers
        self._ring: BuddyRing | None = None
        self._generation: Generation | None = None
        self._live: tuple[int, Progress] | None = None
        self._as_built: dict[str, bool] = {}

    def enter(self, generation: Generation) -> None:
        """Begin a generation, whose groups and engine are there; each rank must call."""
        self._as_built = flags_of(self._fit.trainer.lightning_module)
        self._generation = generation
        self._ring = BuddyRing(
            self._host_collectives(), self._fit.buddy_stride, buffers=self._buffers, held=self.held
        )

    def remember(self, *, behind_step: bool, flags: int = 0) -> int:
        """Take a snapshot and begin to send it to the buddy; each rank must call.

        Args:
            behind_step: Whether this boundary lies behind an optimizer step.
            flags: Bits that all ranks are to hear of.

        Returns:
            The flags of all ranks together.

        Raises:
            RankFailedError: A peer is lost.
        """
        assert self._ring is not None
        step, progress = self._moment(behind_step=behind_step)
        heard = self._ring.begin(self._take(step, progress), flags)
        self._note_live(step, progress)
        return heard

    def note_progress(self) -> None:
        """Note how far training is behind a step of which no snapshot is taken.

        It counts under a replicated scheme only, whose live state is that of the boundary.
        """
        if self._is_replicated:
            self._note_live(*self._moment(behind_step=True))

    def forget_live(self, *_: Any) -> None:
        """Note that the live state has changed; the hook of an optimizer's step."""
        self._live = None

    def finish(self) -> None:
        """Wait until the buddy has the last snapshot; each rank must call."""
        assert self._ring is not None
        self._ring.finish()

    def hand_over(self, leaving: Sequence[bool]) -> None:
        """Give snapshots of ranks that leave to ranks that stay; each rank must call."""
        assert self._ring is not None
        self._ring.hand_over(leaving)

    def close(self) -> None:
        """End a generation, broken or not, whose engine is still there with its values."""
        ring, self._ring = self._ring, None
        live, self._live = self._live, None
        if ring is None:
            return
        ring.salvage()
        self.held = ring.held
        if live is not None:
            self.held = [self._take(*live), *self.held]

    def clear(self) -> None:
        """Let go of all snapshots and groups: the fit is over."""
        self.held, self._buffers = [], HostBuffers()
        self._ring = self._live = None

    @property
    def _is_replicated(self) -> bool:
        return self._fit.strategy.engine.options.stage == 0

    def _moment(self, *, behind_step: bool) -> tuple[int, Progress]:
        assignment = self._fit.data_assignment.batch_assignment
        trainer, values = self._fit.trainer, self._fit.hook_values.held()
        progress = Progress.of(trainer, assignment, self._as_built, values, behind_step=behind_step)
        return self._fit.trainer.global_step, progress

    def _note_live(self, step: int, progress: Progress) -> None:
        if self._is_replicated:
            self._live = step, progress

    def _take(self, step: int, progress: Progress) -> Snapshot:
        assert self._generation is not None
        return take(
            self._fit.strategy.engine,
            self._fit.strategy.optimizers,
            step=step,
            extra=progress.pack(),
            generation=self._generation.number,
            owner=self._generation.me,
            buffers=self._buffers,
        )

    def _host_collectives(self) -> Collectives:
        """The ranks over a group for host memory, whose messages pass while others wait."""
        strategy = self._fit.strategy
        if strategy.root_device.type == "cpu" or current_world() is not None:
            return strategy.collectives.duplicate(self._fit.timeout)
        group = dist.new_group(backend="gloo", timeout=self._fit.timeout)
        return get_backend("gloo").collectives(group)
