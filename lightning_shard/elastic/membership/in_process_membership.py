"""Membership of ranks that are threads of this process: the table itself, and no server.

    thread 0 ──join, arrive, leave──> table <── a rank was dropped, failed or ended (the world)
    thread 0 <──generation, wanted──

Nothing depends on the time: the hour of patience comes when nobody can run any more.
"""

import logging
from collections import defaultdict, deque
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from lightning_shard.backends.base import Backend
from lightning_shard.backends.in_process import ElasticWorld, current_world
from lightning_shard.elastic.membership.generation import Generation, Membership
from lightning_shard.elastic.membership.membership_table import (
    SHORTEST_START_SECONDS,
    Bounds,
    MembershipTable,
)
from lightning_shard.errors import ConfigError, EvictedError, JobOverError

_log = logging.getLogger(__name__)
_NEVER = float("inf")


class InProcessMembership(Membership):
    """One rank's part in an elastic job inside an in-process world, made while it runs."""

    def __init__(self, bounds: Bounds) -> None:
        world = current_world()
        if not isinstance(world, ElasticWorld):
            raise ConfigError(
                "InProcessMembership: expected an elastic in-process world to run, got "
                f"{'none' if world is None else 'one whose ranks stay'}. Train with "
                "strategy='elastic_in_process'."
            )
        self._world = world
        self._job = world.shared(_Job, lambda: _Job(world, bounds))
        self.me = f"thread{world.thread}"
        self.first_size = world.num_first_ranks
        self._generation = 0
        self._has_joined = self._has_left = False

    @override
    def begin(self) -> Generation | None:
        if self._world.is_spare:
            return None
        self._join(initial_rank=self._world.thread)
        return self._next_generation()

    @override
    def following(self, error: BaseException | None = None) -> Generation:
        # What peers share with this rank in the last groups raises RankFailedError there.
        self._world.leave_generation(self._generation)
        if not self._has_joined:
            self._join(initial_rank=None)
        told = None if error is None else f"{type(error).__name__}: {error}"
        job = self._job
        job.membership_table.arrive(self.me, self._generation, told, job.now)
        generation = self._next_generation(error)
        assert generation is not None  # only an initial rank can be late
        return generation

    @override
    def init_groups(
        self, generation: Generation, backend: Backend, device: torch.device, timeout: timedelta
    ) -> None:
        if generation.number > 0:
            threads = [self._job.threads[member] for member in generation.members]
            self._world.reconfigure(generation.number, threads)
        backend.init_process_group(
            rank=generation.rank, world_size=generation.size, device=device, timeout=timeout
        )

    @override
    def drop_groups(self) -> None:
        if self._takes_part:
            self._world.drop_groups()

    @property
    @override
    def is_wanted(self) -> bool:
        return self._job.is_wanted[self.me]

    @property
    @override
    def is_leaving(self) -> bool:
        return self._world.is_asked_to_leave

    @override
    def begin_step(self, step: int) -> None:
        self._world.begin_step(step)  # where faults strike

    @override
    def end_run(self) -> None:
        self.leave()  # a thread takes part for one run

    @override
    def leave(self) -> None:
        if not self._has_joined or self._has_left or not self._takes_part:
            return
        self._has_left = True
        self._job.membership_table.leave(self.me, is_done=not self.is_leaving, now=self._job.now)
        self._world.leave_generation(self._generation)

    @property
    def _takes_part(self) -> bool:
        """Whether this rank runs in its world; a dropped one is only being taken down."""
        return current_world() is self._world and not self._world.is_gone

    def _join(self, initial_rank: int | None) -> None:
        job, thread = self._job, self._world.thread
        job.threads[self.me] = thread
        self.me = job.membership_table.join(self.me, initial_rank, job.now)
        job.threads[self.me] = thread
        self._has_joined = True

    def _next_generation(self, error: BaseException | None = None) -> Generation | None:
        """Wait for what the table says of the next generation; None: it began without this one."""
        job = self._job
        inbox = job.inboxes[self.me]
        self._world.wait_for_news(
            lambda: bool(inbox),
            lambda: f"{self.me} waits for the generation after {self._generation}",
            job.let_time_pass,
        )
        message = inbox.popleft()
        match message["kind"]:
            case "generation":
                self._generation = message["number"]
                return Generation.told(message, self.me)
            case "late":
                return None
            case "evicted":
                raise self._evict(message) from error
        raise JobOverError(f"The job has ended before member {self.me} could take part in it.")

    def _evict(self, message: dict[str, Any]) -> EvictedError:
        return EvictedError(
            f"Rank {self._world.rank} (member {self.me}) was evicted from the job: it has failed "
            f"{message['failures']} times, the last time with {message['error']}. Mend that "
            "error; other ranks that have not failed go on without this one."
        )


class _Job:
    """What the ranks of one world share: the table, and what it has told each member.

    The time stands still while anybody can run.
    """

    def __init__(self, world: ElasticWorld, bounds: Bounds) -> None:
        self.now = 0.0
        self.threads: dict[str, int] = {}
        self.inboxes: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self.is_wanted: defaultdict[str, bool] = defaultdict(bool)
        self._longest_wait = max(bounds.patience_seconds, SHORTEST_START_SECONDS)
        self._texts: set[str] = set()
        self._num_told = 0
        self.membership_table = MembershipTable(
            bounds,
            initial_size=world.num_first_ranks,
            silence_seconds=_NEVER,
            tell=self._take,
            now=self.now,
        )
        world.call_when_ended(self._lose)

    def let_time_pass(self) -> bool:
        """Let the longest of the table's times pass; return whether it had anything to tell."""
        num_told = self._num_told
        self.now += self._longest_wait
        self.membership_table.tick(self.now)
        return self._num_told > num_told

    def _take(self, member: str, message: dict[str, Any]) -> None:
        """Keep what the table tells a member."""
        match message["kind"]:
            case "generation" | "evicted" | "over" | "late":
                self._num_told += 1
                self.is_wanted[member] = False
                self.inboxes[member].append(message)
            case "wanted":
                self.is_wanted[member] = message["is_wanted"]
            case "waiting" if message["text"] not in self._texts:
                self._texts.add(message["text"])
                _log.warning(message["text"])

    def _lose(self, thread: int, event: str) -> None:
        for member, its_thread in list(self.threads.items()):
            if its_thread == thread:
                self.membership_table.lost(member, self.now, event)
