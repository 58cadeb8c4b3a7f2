"""Messages from peers at any time, which a rank takes without waiting or waits for.

Where a backend can be asked whether a message has come (in_process, mpi), a receive is posted per
peer and polled; Gloo's receive tells in `wait` only, so one thread per peer waits. Nothing is
posted once a peer's last message has come: a validation of an hour is no time-out.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.liveness.interruption import end_at_exit, interrupt_group
from lightning_shard.backends.pending import Pending

Arrival = tuple[int, Tensor]
_END_SECONDS = 5.0


class Mailbox(ABC):
    """One rank's messages to and from each peer, all of one size, in order per peer."""

    def __init__(
        self, ranks: Collectives, num_words: int, is_last: Callable[[Tensor], bool]
    ) -> None:
        self.peers = [rank for rank in range(ranks.size) if rank != ranks.rank]
        self.received = [0] * ranks.size
        self._ranks, self._num_words, self._is_last = ranks, num_words, is_last
        self._on_their_way: list[deque[Pending]] = [deque() for _ in range(ranks.size)]
        self._arrived_there = [0] * ranks.size
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Listen to every peer."""

    @abstractmethod
    def _poll(self) -> list[Arrival]:
        """Return the messages that have come, with their senders."""

    @abstractmethod
    def _wait(self) -> list[Arrival]:
        """Wait for at least one message; return those that have come, with their senders."""

    def poll(self) -> list[Arrival]:
        """Return the messages that have come with their senders, in order for each sender."""
        return self._counted(self._poll())

    def wait(self) -> list[Arrival]:
        """Wait for at least one message, as `poll`; some peer must not have sent its last."""
        return self._counted(self._wait())

    def _counted(self, arrivals: list[Arrival]) -> list[Arrival]:
        for peer, _ in arrivals:
            self.received[peer] += 1
        return arrivals

    def send(self, peer: int, data: Tensor) -> None:
        """Start sending; the mailbox keeps `data` until the peer has taken it."""
        self._on_their_way[peer].append(self._ranks.send(data, peer, async_op=True))

    def arrived_there(self, peer: int, count: int) -> None:
        """Let go of the first `count` messages to a peer, which it has taken."""
        while self._arrived_there[peer] < count:
            self._on_their_way[peer].popleft().wait()
            self._arrived_there[peer] += 1

    def finish(self) -> None:
        """Wait until every message that was sent has arrived; every peer must take it."""
        for pending in self._on_their_way:
            while pending:
                pending.popleft().wait()

    def abandon(self) -> None:
        """After a failure, leave nothing behind that waits or is in flight."""
        self._on_their_way.clear()

    def _room(self) -> Tensor:
        return torch.empty(self._num_words, dtype=torch.int64)


class PolledMailbox(Mailbox):
    """A mailbox that polls a posted receive of each peer, which lets ranks in one process run."""

    _pause_seconds = 0.0001

    @override
    def start(self) -> None:
        self._posted: dict[int, tuple[Tensor, Pending]] = {}
        for peer in self.peers:
            self._post(peer)

    def _post(self, peer: int) -> None:
        data = self._room()
        self._posted[peer] = data, self._ranks.recv(data, peer, async_op=True)

    @override
    def _poll(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for peer in list(self._posted):
            while peer in self._posted and self._posted[peer][1].is_ready():
                data, pending = self._posted.pop(peer)
                pending.wait()
                arrivals.append((peer, data))
                if not self._is_last(data):
                    self._post(peer)
        return arrivals

    @override
    def _wait(self) -> list[Arrival]:
        while not (arrivals := self._poll()):
            time.sleep(self._pause_seconds)  # leaves the core to others
        return arrivals


class InProcessMailbox(PolledMailbox):
    """A polled mailbox that does not pause, since polling lets the other ranks run."""

    _pause_seconds = 0.0


class ThreadedMailbox(Mailbox):
    """A mailbox with one thread per peer, which waits for messages and hands them over."""

    @override
    def start(self) -> None:
        self._arrivals: queue.SimpleQueue[Arrival | BaseException] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._listen, args=(peer,), name=f"from-rank-{peer}", daemon=True
            )
            for peer in self.peers
        ]
        for thread in self._threads:
            end_at_exit(thread)
            thread.start()

    def _listen(self, peer: int) -> None:
        ranks = type(self._ranks)(self._ranks.group)  # counters of its own: threads share none
        try:
            while True:
                data = self._room()
                ranks.recv(data, peer)
                self._arrivals.put((peer, data))
                if self._is_last(data):
                    return
        except BaseException as error:
            self._arrivals.put(error)

    @override
    def _poll(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        while not self._arrivals.empty():
            arrivals.append(self._next())
        return arrivals

    @override
    def _wait(self) -> list[Arrival]:
        return [self._next(), *self._poll()]

    def _next(self) -> Arrival:
        arrival = self._arrivals.get()
        if isinstance(arrival, BaseException):
            raise arrival
        return arrival

    @override
    def finish(self) -> None:
        super().finish()
        for thread in self._threads:
            thread.join()

    @override
    def abandon(self) -> None:
        super().abandon()
        if any(thread.is_alive() for thread in self._threads):
            interrupt_group(self._ranks.group)
        for thread in self._threads:
            thread.join(_END_SECONDS)


def mailbox_type(backend_name: str) -> type[Mailbox]:
    """Return the mailbox for messages over a backend."""
    kinds = {"in_process": InProcessMailbox, "mpi": PolledMailbox, "shm": PolledMailbox}
    return kinds.get(backend_name, ThreadedMailbox)
