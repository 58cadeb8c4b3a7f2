"""Generations of members, and the protocol by which a rank asks for the next one.

    generation 1: a b c d ──c is lost──> generation 2: a b d ──e comes──> generation 3: a b d e
         rank 0 1 2 3                         rank 0 1 2                      rank 0 1 2 3

A member is a process, or in process a rank's thread. A generation has one set of process groups.
Members keep their order, and newcomers come last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.base import Backend
from lightning_shard.backends.liveness.thread import Terminable
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.errors import EvictedError, JobOverError


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The members between one change and the next.

    Attributes:
        number: Counts the generations of a job from 1. A newcomer that waits to be let in is alone
            in a generation 0.
        members: The members in the order of their ranks: survivors by seniority, then newcomers.
        me: The member that this process is.
        is_last: Whether too few ranks were there for too long, so that this generation rebuilds
            the state, saves it and ends.
        reason: What has made this generation, for messages: "rank 2 (member x) died".
    """

    number: int
    members: tuple[str, ...]
    me: str
    is_last: bool = False
    reason: str = ""

    @classmethod
    def told(cls, message: Mapping[str, Any], me: str) -> "Generation":
        """Return what a message of the membership table tells the member `me` of."""
        names = ("number", "is_last", "reason")
        known = {name: message[name] for name in names}
        return cls(members=tuple(message["members"]), me=me, **known)

    @property
    def rank(self) -> int:
        """This process's rank in this generation."""
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)


def end_told(message: Mapping[str, Any], me: str) -> Exception:
    """Return the error of the member `me`, which the membership table has told of its end."""
    if message["kind"] == "over":
        return JobOverError("The job has ended before this rank could take part in it.")
    return EvictedError(
        f"This rank (member {me}) was evicted from the job: it has failed {message['failures']} "
        f"time(s), the last time with {message['error']}. Mend the cause; the ranks that are left, "
        "if any, go on without it."
    )


@dataclass(frozen=True)
class GroupSetup:
    """What the groups of each generation are made with."""

    backend: Backend
    device: torch.device
    timeout: timedelta

    def make(self, rank: int, world_size: int, store: Store | None = None) -> None:
        """Start a default process group; each of its ranks must call."""
        self.backend.init_process_group(
            rank=rank, world_size=world_size, device=self.device, timeout=self.timeout, store=store
        )


class Membership(Protocol):
    """One rank's part in an elastic job.

    Attributes:
        me: This member's id; another one after `following` has taken it in anew.
        first_size: Number of ranks that the job was started for, whether or not all have come.
        started_by: Who has started all ranks that there are, and may start more later; None where
            the job says itself how many it was started for.
        held: The snapshots that this rank's predecessors have left of the present fit.
        has_past: Whether any rank's predecessors have left some.
    """

    me: str
    first_size: int
    held: Sequence[Snapshot] = ()
    has_past: bool = False
    started_by: str | None = None

    def begin(self) -> Generation | None:
        """Wait for generation 1, in which all initial ranks are; a newcomer gets None at once."""

    def following(self, error: BaseException | None = None) -> Generation:
        """Arrive, and wait for the next generation; each member of the last one must call.

        `error` is what this rank itself has raised, not what a lost peer has led to.

        Raises:
            EvictedError: This rank has failed too often, or all have failed at once.
            JobOverError: The job has ended, or this rank was asked to leave while it waited.
            RankFailedError: The job cannot be reached any more.
        """

    def init_groups(self, generation: Generation, setup: GroupSetup) -> None:
        """Start the generation's default process group; each of its members must call."""

    def drop_groups(self) -> None:
        """Forget this rank's groups, broken or not; safe when peers are gone."""

    @property
    def is_wanted(self) -> bool:
        """Whether a newcomer waits and there is room: bring it up at the next boundary."""

    @property
    def is_leaving(self) -> bool:
        """Whether this rank was asked to leave at the next boundary."""

    def begin_fit(self) -> None:
        """Find what predecessors have left of the fit that begins; each rank must call."""
        return

    def make_buffers(self) -> HostBuffers:
        """Return where this rank's snapshots of the present fit are written."""
        return HostBuffers()

    def begin_step(self, step: int) -> None:
        """Note that this rank begins this optimizer step."""
        return

    def forget_past(self) -> None:
        """Remove what predecessors have left, now that every rank has something newer."""
        return

    def watch_signals(self) -> Terminable | None:
        """Return what is told of SIGTERM during a run; None leaves it to the strategy."""
        return None

    def end_run(self) -> None:
        """Note that a Trainer's run has ended on this rank, well or not."""
        return

    def leave(self) -> None:
        """Leave the job in order: training has ended, or this rank was asked to leave."""
