"""What a rank remembers of the last boundaries, over generations.

sharded      every `snapshot_every` steps a snapshot, which its buddy gets as well
replicated   the same without a buddy; and between a boundary and the next update the parameters
             and the optimizer state themselves *are* that boundary's, so that nothing is lost:
             of each step only the progress is noted, and the rest is taken when peers are lost
"""

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.host_buffers import HostBuffers, SnapshotBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.elastic.buddies import BuddyRing
from lightning_shard.elastic.generation import Generation
from lightning_shard.elastic.progress import Progress


class SnapshotMemory:
    """One rank's snapshots and its buddy's.

    Args:
        buffers: Where snapshots lie; in this process's memory when left out.
        held: What predecessors of this process have left.

    Attributes:
        held: What there is to go on from, when a generation has ended.
    """

    def __init__(
        self, buffers: SnapshotBuffers | None = None, held: Sequence[Snapshot] = ()
    ) -> None:
        self.held = [*held]
        self._buffers = HostBuffers() if buffers is None else buffers
        self._ring: BuddyRing | None = None
        self._generation: Generation | None = None
        self._live: tuple[int, Progress] | None = None

    def enter(self, generation: Generation, collectives: Collectives, stride: int) -> None:
        """Begin a generation; each rank must call.

        Args:
            generation: Which one.
            collectives: Its ranks, over a group of its own for host memory.
            stride: How far away a rank's buddy is.
        """
        self._generation = generation
        self._ring = BuddyRing(collectives, stride, buffers=self._buffers, held=self.held)

    def remember(
        self,
        engine: DataParallelEngine,
        optimizers: Sequence[Optimizer],
        step: int,
        progress: Progress,
        flags: int = 0,
    ) -> int:
        """Take a snapshot and begin to send it to the buddy; each rank must call.

        Args:
            engine: At a boundary.
            optimizers: Its.
            step: Optimizer steps done.
            progress: Of this moment.
            flags: Bits that all ranks are to hear of.

        Returns:
            The flags of all ranks together.

        Raises:
            RankFailedError: A peer is lost.
        """
        assert self._ring is not None
        return self._ring.begin(self._take(engine, optimizers, step, progress), flags)

    def finish(self) -> None:
        """Wait until the buddy has the last snapshot; each rank must call."""
        assert self._ring is not None
        self._ring.finish()

    def hand_over(self, leaving: Sequence[bool]) -> None:
        """Give what ranks that leave remember to ranks that stay; each rank must call."""
        assert self._ring is not None
        self._ring.hand_over(leaving)

    def note_live(self, step: int, progress: Progress) -> None:
        """Note that from now on the live state is that of a boundary, under a replicated scheme."""
        self._live = step, progress

    def forget_live(self) -> None:
        """Note that the live state has changed."""
        self._live = None

    def close(self, engine: DataParallelEngine, optimizers: Sequence[Optimizer]) -> None:
        """End a generation, broken or not: gather what there is to go on from.

        Args:
            engine: Still with its values.
            optimizers: Its.
        """
        ring, self._ring = self._ring, None
        live, self._live = self._live, None
        if ring is None:
            return
        ring.salvage()
        self.held = ring.held
        if live is not None:
            self.held = [self._take(engine, optimizers, *live), *self.held]

    def _take(
        self,
        engine: DataParallelEngine,
        optimizers: Sequence[Optimizer],
        step: int,
        progress: Progress,
    ) -> Snapshot:
        assert self._generation is not None
        return take(
            engine,
            optimizers,
            step=step,
            extra=progress.pack(),
            generation=self._generation.number,
            owner=self._generation.me,
            buffers=self._buffers,
        )
