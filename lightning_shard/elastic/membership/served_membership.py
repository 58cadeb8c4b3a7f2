"""Membership of real processes: one connection to the job's rendezvous server, kept by a thread.

    main thread                     ServedMembership                membership thread
    begin, following ─────────────> what it wants ──────────────> server
    is_wanted, init_groups <─────── what the server has said <─── rendezvous server
                                    groups interrupted  <──────── "lost": a member has gone

The process groups of a generation are made over the server's store, which no rank's death takes
along. Nobody begins before all are ready, so that a member that dies meanwhile is heard of first.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from threading import Condition
from time import monotonic
from typing import Self

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, RankGroups, set_groups
from lightning_shard.backends.authentication.connection import (
    Connection,
    Message,
    WrongTokenError,
    connect,
)
from lightning_shard.backends.authentication.loop import Loop
from lightning_shard.backends.authentication.store import store_at
from lightning_shard.backends.authentication.token import (
    JobAddress,
    find_token,
    remember,
    wrong_token,
)
from lightning_shard.backends.liveness import job_server
from lightning_shard.backends.liveness.interruption import end_at_exit, interrupt_groups
from lightning_shard.backends.liveness.thread import (
    KeptConnection,
    unwatch_signals_by,
    watch_signals_by,
)
from lightning_shard.core import settings
from lightning_shard.elastic.membership.generation import (
    Generation,
    GroupSetup,
    Membership,
    end_told,
)
from lightning_shard.elastic.membership.rendezvous_server import MEMBER
from lightning_shard.errors import JobOverError, RankFailedError

_LONGEST_ERROR = 500
LONGEST_START_SECONDS = 60.0
_LONGEST_CONNECTING_SECONDS = 5.0  # with a job that runs


class ServedMembership(Membership):
    """This process's part in the job that a rendezvous server keeps."""

    def __init__(self, job: settings.Job, initial_rank: int | None, timeout: timedelta) -> None:
        self.me, self.first_size = "", 0
        self._address = _address_of(job)
        remember(self._address.token)
        self._initial_rank = initial_rank
        self._timeout = timeout
        self._generation: Generation | None = None
        self._grouped = 0  # the generation whose groups stand or are being made
        # What the server has said; guarded by `_news`, and notified.
        self._news = Condition()
        self._next: Message | None = None
        self._go = 0
        self._losses: dict[int, list[Message]] = {}
        self._is_wanted = self._is_leaving = False
        self._end: Exception | None = None  # nothing more comes
        self._is_declared_dead = False
        self._is_late = False
        self._server = KeptConnection(
            _connect(self._address, is_starting=initial_rank is not None),
            timeout.total_seconds(),
            # A rendezvous server that has just been started is imported still: that is no silence.
            heard=monotonic() + LONGEST_START_SECONDS,
        )
        self._thread = Loop("lightning-shard-membership")
        self._server.keep(self._thread, self)
        self._thread.start()
        # Without a word: by its silence the others hear that this rank failed.
        end_at_exit(self._thread, self._thread.ask_to_end)
        self._join(initial_rank)

    # --- asked by the main thread ---------------------------------------------------------------

    @property
    @override
    def is_wanted(self) -> bool:
        return self._is_wanted

    @property
    @override
    def is_leaving(self) -> bool:
        return self._is_leaving

    def ask_to_leave(self) -> None:
        """Have this rank leave at the next boundary; from any thread."""
        with self._news:
            self._is_leaving = True
            self._news.notify_all()

    @property
    def is_ending(self) -> bool:
        """Whether the process is ending already, so that a second signal changes nothing."""
        return self._thread.is_ending

    announce_termination = ask_to_leave

    def announce_requeue(self) -> None:
        """Do nothing: the job goes on where SLURM starts it again."""

    @override
    def watch_signals(self) -> Self:
        """Have the thread told of signals, and return who is to be told of SIGTERM as well."""
        watch_signals_by(self._thread.signal_fd)
        return self

    @override
    def end_run(self) -> None:
        """Undo `watch_signals`."""
        unwatch_signals_by(self._thread.signal_fd)

    @override
    def begin(self) -> Generation | None:
        if self._initial_rank is None:
            return None
        with self._news:
            self._await(lambda: self._next is not None or self._is_late)
            return None if self._is_late else self._enter()

    @override
    def following(self, error: BaseException | None = None) -> Generation:
        text = None if error is None else f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        while True:
            if self._is_declared_dead:
                self._join(None)
                text = None
            with self._news:
                number = 0 if self._generation is None else self._generation.number
                self._server.send({"kind": "arrive", "generation": number, "error": text})
                self._await(self._is_decided)
                if self._next is not None:
                    return self._enter()
                if not self._is_declared_dead:
                    break
        self.leave()
        raise JobOverError("This rank was asked to leave while it waited to take part in the job.")

    @override
    def init_groups(self, generation: Generation, setup: GroupSetup) -> None:
        number, timeout = generation.number, setup.timeout
        with self._news:
            self._grouped = number
        store = PrefixStore(f"lightning_shard/generation{number}", store_at(self._address, timeout))
        if generation.rank == 0:  # before it is ready: nobody waits for what a lost rank was to say
            own = replace(self._address, host=self._server.own_address, port=0)
            job_server.tell_address(store, job_server.serve(own))
        self._server.send({"kind": "ready", "generation": number})
        with self._news:
            self._await(lambda: self._go == number or self._has_lost(number), timeout)
            if self._go != number:
                raise self._lost_while_meeting(generation)
        liveness.start(
            job_server.told_address(store, self._address.token),
            rank=generation.rank,
            world_size=generation.size,
            timeout=timeout,
            look=partial(self._check, generation),
        )
        setup.make(generation.rank, generation.size, store)

    def _has_lost(self, number: int) -> bool:
        return bool(self._losses.get(number)) or self._is_declared_dead

    def _check(self, generation: Generation) -> None:
        """Return unless a rank of the generation is known to be lost."""
        with self._news:
            if self._has_lost(generation.number):
                raise self._lost_while_meeting(generation)

    @override
    def drop_groups(self) -> None:
        with self._news:
            number, self._grouped = self._grouped, 0
            is_broken = self._has_lost(number)
        lifeline = liveness.current()
        # Whole groups are not interrupted: a slower peer may still read what was sent to it.
        if is_broken or (lifeline is not None and lifeline.has_verdict):
            interrupt_groups()
        liveness.stop()
        job_server.end_service()
        with contextlib.suppress(RuntimeError):  # what fails on a broken group is forgotten
            if dist.is_initialized():
                dist.destroy_process_group()
        set_groups(RankGroups())  # a start that was given up has counted a group

    @override
    def leave(self) -> None:
        self.end_run()  # before the thread closes what is written to
        with self._news:  # the server goes with the last member, perhaps before this thread
            self._end = self._end or JobOverError("This rank has left the job.")
        self._server.send({"kind": "leave", "is_done": not self._is_leaving})
        self._thread.end()

    # --- states ---------------------------------------------------------------------------------

    def _join(self, initial_rank: int | None) -> None:
        """Become a participant of the job, under a new id."""
        with self._news:
            self.me, self._is_declared_dead, self._is_wanted = "", False, False
            self._generation = self._next = None
            name = f"{socket.gethostname()}:{os.getpid()}"
            self._server.send({"kind": "join", "name": name, "initial_rank": initial_rank})
            self._await(lambda: bool(self.me))

    def _enter(self) -> Generation:
        """Take up the generation that the server has told of."""
        assert self._next is not None
        told, self._next = self._next, None
        self._losses = {n: lost for n, lost in self._losses.items() if n >= told["number"]}
        self._generation = Generation.told(told, self.me)
        return self._generation

    def _is_decided(self) -> bool:
        # A member's boundary to leave at is still to come; a newcomer has none, and gives up.
        gives_up = self._is_leaving and self._generation is None
        return self._next is not None or self._is_declared_dead or gives_up

    def _await(self, is_so: Callable[[], bool], timeout: timedelta | None = None) -> None:
        """Wait, holding `_news`, until `is_so` holds, or until nothing more can come."""
        seconds = None if timeout is None else timeout.total_seconds()
        self._news.wait_for(lambda: is_so() or self._end is not None, seconds)
        if self._end is not None and not is_so():
            raise self._end

    def _lost_while_meeting(self, generation: Generation) -> RankFailedError:
        losses = self._losses.get(generation.number, [])
        what = "; ".join(f"rank {one['rank']} {one['event']}" for one in losses)
        if self._is_declared_dead:
            what = "this rank itself was given up by the job"
        return RankFailedError(
            f"Rank {generation.rank} of {generation.size} lost a peer in making the groups of "
            f"generation {generation.number}: {what or 'a rank does not come'}."
        )

    # --- told by the membership thread ----------------------------------------------------------

    longest_beat_seconds = 1.0
    requeue_signal = 0

    def tick(self, now: float) -> None:
        """Beat."""
        self._server.send({"kind": "beat"})

    def heard(self, message: Message, now: float) -> None:
        """Take a message of the server."""
        with self._news:
            kind = message["kind"]
            if kind == "joined":
                self.me, self.first_size = message["member"], message["first_size"]
            elif kind == "generation":
                self._next, self._is_wanted = message, False
            elif kind == "wanted":
                self._is_wanted = message["is_wanted"]
            elif kind == "go":
                self._go = message["generation"]
            elif kind == "lost":
                self._losses.setdefault(message["generation"], []).append(message)
            elif kind == "declared_dead" and message["member"] == self.me:
                self._is_declared_dead = True
            else:
                self._hear_of_end(message)
            self._news.notify_all()
        self._interrupt_if_broken()

    def _hear_of_end(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "late":
            self._is_late, self._initial_rank = True, None
        elif kind == "waiting":
            self._print(message["text"])
        elif kind in ("over", "evicted"):
            self._end = end_told(message, self.me)

    def _interrupt_if_broken(self) -> None:
        """Have the main thread give up what it waits for in the groups of a broken generation."""
        with self._news:
            number = self._grouped
            losses = self._losses.get(number, []) if number else []
            lifeline = liveness.current()
            if self._is_declared_dead and number:
                interrupt_groups()
            elif losses and lifeline is not None:
                lifeline.lost(losses[0]["rank"], losses[0]["event"])
            elif losses:
                interrupt_groups()

    def server_lost(self, event: str) -> None:
        """Take note that nothing more comes from the server."""
        self._server.drop()
        with self._news:
            if self._end is None:
                self._end = RankFailedError(
                    f"The elastic job's rendezvous server on {self._address.host}, port "
                    f"{self._address.port}, {event}: no rank can join or be replaced any more. Go "
                    "on from the last checkpoint."
                )
                self._print(
                    f"the job's rendezvous server {event}; ranks that are lost are not replaced"
                )
            self._news.notify_all()

    def _print(self, news: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            print(f"[member {self.me}] {news}", file=sys.stderr, flush=True)


def _address_of(job: settings.Job) -> JobAddress:
    on_one_host = settings.is_loopback(job.host)
    token = job.token or find_token(job.port, on_one_host=on_one_host, rank=1)
    return JobAddress(host=job.host, port=job.port, token=token)


def _connect(address: JobAddress, is_starting: bool) -> Connection:
    """Connect; while the job starts on several hosts, its server may still be to come."""
    seconds = LONGEST_START_SECONDS if is_starting else _LONGEST_CONNECTING_SECONDS
    try:
        return connect(address, MEMBER, seconds)
    except WrongTokenError as error:
        raise wrong_token(address, error) from error
    except OSError as error:
        raise RankFailedError(
            f"The elastic job at {address.host}, port {address.port}, cannot be reached. Check "
            f"that it still runs and that LIGHTNING_SHARD_JOB is what its first process has "
            f"printed. The system said: {error}"
        ) from error
