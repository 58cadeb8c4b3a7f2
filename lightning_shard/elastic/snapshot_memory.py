"""A rank's memory of the last boundaries, over generations.

sharded      every `snapshot_every` steps a snapshot, which its buddy gets as well
replicated   the same without a buddy; and between a boundary and the next update the parameters
             and the optimizer state themselves *are* that boundary's: of each step only the
             progress is noted, and the rest is taken when peers are lost

Each rank keeps a copy of another rank's snapshot.

    stride 1    0 ──> 1 ──> 2 ──> 3 ──> 0       on one host: any ranks may be lost but neighbours
    stride 2    0 ──> 2 ──> 0   1 ──> 3 ──> 1   two ranks a host: a whole host may be lost

Snapshot k travels while the ranks compute; k - 1 goes when all have come to k + 1, so that a loss
while k + 1 travels leaves k complete everywhere. Source: Gemini, SOSP 2023,
doi:10.1145/3600006.3613145.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.pending import OperationContext, Span
from lightning_shard.backends.registry import get_backend
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.elastic.membership.generation import Generation
from lightning_shard.elastic.progress import Progress, flags_of
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.errors import ConfigError, ShardError

_MESSAGE_BYTES = 1 << 30  # MPI counts in 32 bits


class _Message(NamedTuple):
    """A part of a snapshot on its way."""

    work: dist.Work
    data: Tensor  # must live as long as the work


@dataclass(kw_only=True)
class _PendingCopy:
    """An exchange of snapshots that is not finished yet."""

    buffer: Tensor  # where the other rank's snapshot goes
    receives: list[_Message]
    sends: list[_Message]
    arrived: list[bool] = field(default_factory=list)  # of the receives that were waited for


class BuddyRing:
    """A rank's snapshots and those of the rank that it backs up, over one generation.

    Args:
        collectives: All ranks of the generation, over a group of its own for host memory: the
            snapshots travel while the ranks use their other groups. Each rank must construct this.
        stride: How far away the buddy is: ranks per host on several hosts, else 1.
        buffers: Where received snapshots go, and where both go back to; own ones when left out.
        held: Snapshots of earlier generations; kept until one of this generation is everywhere.
    """

    def __init__(
        self,
        collectives: Collectives,
        stride: int = 1,
        *,
        buffers: HostBuffers | None = None,
        held: Iterable[Snapshot] = (),
    ) -> None:
        if stride < 1:
            raise ConfigError(
                f"Rank {collectives.rank}: got a stride of {stride} between buddies, expected the "
                f"number of ranks per host, or 1."
            )
        size = collectives.size
        stride = stride % size or min(1, size - 1)
        self.target = (collectives.rank + stride) % size
        self.source = (collectives.rank - stride) % size
        self._collectives = collectives
        self._stride = stride
        self._buffers = HostBuffers() if buffers is None else buffers
        self._complete = list(held)
        self._last: tuple[int, int, int] | None = None  # whose exchange is finished here
        self._pending: _PendingCopy | None = None
        self._sizes: list[int] = []  # of the last snapshots, by rank

    @property
    def held(self) -> list[Snapshot]:
        """The complete snapshots that are here, the newest first."""
        return sorted(self._complete, key=_moment, reverse=True)

    def begin(self, snapshot: Snapshot, flags: int = 0) -> int:
        """Keep this rank's snapshot, finish the last exchange, start the next; each must call."""
        self._complete.append(snapshot)
        self.finish()
        sizes, heard = self._meet(snapshot, flags)
        self._sizes = sizes
        self._drop_old(_moment(snapshot))
        self._last = _moment(snapshot)
        if self._collectives.size > 1 and snapshot.metadata.num_shards > 1:
            self._start(snapshot, sizes[self.source])
        return heard

    def finish(self) -> None:
        """Wait until the exchange, if one is on, is over; each rank must call."""
        pending = self._pending
        if pending is None:
            return
        one = self._collectives
        with Span(OperationContext("buddy", one.rank, one.size, one.traffic)) as span:
            for message in pending.receives[len(pending.arrived) :]:
                pending.arrived.append(False)
                message.work.wait()
                pending.arrived[-1] = True
            for message in pending.sends:
                message.work.wait()
            span.has_waited()
        self._pending = None
        self._take_in(pending.buffer)

    def hand_over(self, leaving: Sequence[bool]) -> None:
        """Give the last snapshots of ranks that leave to ranks that stay; each rank must call."""
        one = self._collectives
        newest = self.held[0]
        if newest.metadata.num_shards == 1:
            return
        for rank, target in hand_overs(leaving, self._stride):
            if rank == one.rank:
                one.send(newest.data, target).wait()
            elif target == one.rank:
                buffer = self._buffers.lend(self._sizes[rank])
                one.recv(buffer, rank).wait()
                self._take_in(buffer)

    def salvage(self, seconds: float = 1.0) -> None:
        """After a loss, keep a snapshot that has arrived though the exchange cannot be finished.

        It waits a while for what is on its way from a living peer. Not collective. Afterwards only
        what the ring holds may be asked for.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        deadline = time.monotonic() + seconds
        arrived = [*pending.arrived]
        while all(arrived) and len(arrived) < len(pending.receives):
            arrived.append(_has_come(pending.receives[len(arrived)].work, deadline))
        if all(arrived):
            self._take_in(pending.buffer)
        else:
            self._buffers.forget(pending.buffer)

    def _meet(self, snapshot: Snapshot, flags: int) -> tuple[list[int], int]:
        mine = torch.tensor([snapshot.data.numel(), flags], dtype=torch.int64)
        of_all_ranks = mine.new_empty(self._collectives.size * 2)
        self._collectives.all_gather(of_all_ranks, mine).wait()
        heard = 0
        for said in of_all_ranks[1::2].tolist():
            heard |= said
        return of_all_ranks[::2].tolist(), heard

    def _drop_old(self, newest: tuple[int, int, int]) -> None:
        """Drop what is older than the last exchange: all ranks are known to have finished that."""
        if self._last is None:
            return
        for one in self._complete:
            if _moment(one) not in (self._last, newest):
                self._buffers.give_back(one.data)
        self._complete = [one for one in self._complete if _moment(one) in (self._last, newest)]

    def _start(self, snapshot: Snapshot, num_bytes: int) -> None:
        group = self._collectives.group
        buffer = self._buffers.lend(num_bytes)
        self._collectives.traffic.count("buddy", snapshot.data.numel(), 1)
        self._pending = _PendingCopy(
            buffer=buffer,
            receives=_messages(partial(dist.irecv, group=group, group_src=self.source), buffer),
            sends=_messages(partial(dist.isend, group=group, group_dst=self.target), snapshot.data),
        )

    def _take_in(self, buffer: Tensor) -> None:
        snapshot = Snapshot.read(buffer)
        self._buffers.keep(buffer)
        self._complete.append(snapshot)


def hand_overs(leaving: Sequence[bool], stride: int) -> list[tuple[int, int]]:
    """Return who gives a snapshot to whom: if its buddy leaves, too, to the next that stays."""
    size = len(leaving)
    pairs = []
    for rank in (rank for rank in range(size) if leaving[rank] and leaving[(rank + stride) % size]):
        later = ((rank + distance) % size for distance in range(1, size))
        pairs.append((rank, next(other for other in later if not leaving[other])))
    return pairs


def _moment(snapshot: Snapshot) -> tuple[int, int, int]:
    metadata = snapshot.metadata
    return metadata.generation, metadata.step, metadata.num_shards


def _messages(start: Callable[[Tensor], dist.Work | None], data: Tensor) -> list[_Message]:
    """Start to move some bytes, in parts."""
    parts = torch.split(data, _MESSAGE_BYTES)
    works = [cast("dist.Work", start(part)) for part in parts]  # None only outside the group
    return [_Message(*pair) for pair in zip(works, parts, strict=True)]


def _has_come(work: dist.Work, deadline: float) -> bool:
    """Whether a receive is done, or gets done in time; broken ones are not."""
    try:
        if work.is_completed():
            return True
        if current_world() is not None:  # time does not pass there: it never comes
            return False
        # Gloo's receives do not know before they are waited for.
        return work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except (RuntimeError, ShardError):
        return False


class SnapshotMemory:
    """One rank's snapshots and its buddy's."""

    def __init__(
        self, fit: ElasticFit, buffers: HostBuffers, held: Sequence[Snapshot] = ()
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
        """Take a snapshot and begin to send it to the buddy; each rank must call."""
        assert self._ring is not None
        step, progress = self._moment(behind_step=behind_step)
        heard = self._ring.begin(self._take(step, progress), flags)
        self._note_live(step, progress)
        return heard

    def note_progress(self) -> None:
        """Note how far training is under a replicated scheme, whose live state is the newest."""
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
