"""Who takes part: generations of members, and how a rank asks for the next one.

    generation 1: a b c d ──c is lost──> generation 2: a b d ──e comes──> generation 3: a b d e
         rank 0 1 2 3                         rank 0 1 2                      rank 0 1 2 3

A member is a process, or in process a rank's thread, that takes part in the job. A generation is a
numbered tuple of members in the order of their ranks, with one set of process groups: each loss,
join or departure makes a new one. Members keep their order, and newcomers come last, so that the
lowest rank is always the one that has been there for longest.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from lightning_shard.backends.base import Backend
from lightning_shard.errors import EvictedError, JobOverError

__all__ = ["EvictedError", "Generation", "JobOverError", "Membership"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The members between one change and the next.

    Attributes:
        number: From 1; no two generations of a job have the same.
        members: In the order of their ranks: survivors by seniority, then newcomers.
        me: The member that this process is.
        is_last: Too few ranks for too long: rebuild the state, save it and end.
        reason: What has made this generation, for messages: "rank 2 (member x) died".
    """

    number: int
    members: tuple[str, ...]
    me: str
    is_last: bool = False
    reason: str = ""

    @property
    def rank(self) -> int:
        """This process's rank in this generation."""
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)


class Membership(Protocol):
    """One rank's part in an elastic job.

    Attributes:
        me: This member's id; another one after `following` has taken it in anew.
        first_size: With how many ranks the job has begun.
    """

    me: str
    first_size: int

    def begin(self) -> Generation | None:
        """Wait for generation 1, in which all initial ranks are; a newcomer gets None at once.

        Raises:
            RankFailedError: The job cannot be reached.
        """

    def following(self, error: BaseException | None = None) -> Generation:
        """Arrive, and wait for the next generation; each member of the last one must call.

        Args:
            error: What this rank itself has raised; None when it has lost a peer, or when all have
                agreed on a change.

        Raises:
            EvictedError: This rank has failed too often, or all have failed at once.
            JobOverError: The job has ended, or this rank was asked to leave while it waited.
            RankFailedError: The job cannot be reached any more.
        """

    def init_groups(
        self, generation: Generation, backend: Backend, device: torch.device, timeout: timedelta
    ) -> None:
        """Start the generation's default process group; each of its members must call.

        Raises:
            RankFailedError: Another one did not come; ask for the next generation.
        """

    def drop_groups(self) -> None:
        """Forget this rank's groups, broken or not; safe when peers are gone."""

    @property
    def is_wanted(self) -> bool:
        """Whether a newcomer waits and there is room: bring it up at the next boundary."""

    @property
    def is_leaving(self) -> bool:
        """Whether this rank was asked to leave at the next boundary."""

    def begin_step(self, step: int) -> None:
        """Note that this rank begins this optimizer step."""

    def leave(self) -> None:
        """Go in order: training has ended, or this rank leaves after a boundary."""
