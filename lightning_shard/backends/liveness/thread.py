"""The threads that each keep a connection with a server: beats, messages, and signals.

One thread of a process keeps its lifeline, and on rank 0 serves the hub; that of an elastic job's
member is a subclass in `lightning_shard.elastic`. SIGTERM comes here, too.
"""

import contextlib
import os
import signal
import socket
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Protocol

from lightning_shard.backends.authentication.connection import Connection, Message
from lightning_shard.backends.liveness.interruption import interrupt_groups
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.server import HubServer

_LONGEST_BEAT_SECONDS = 5.0
_FIRST_BEAT_SECONDS = 0.25  # until the hub knows that this rank has begun
_UNSENT_SECONDS = 0.01
_LEAVING_SECONDS = 5.0
_WAKE = b"\0"  # no signal's number

TERMINATED_STATUS = 128 + signal.SIGTERM

# Under SLURM both the scheduler and torchrun send the signal to every rank: that is one wish.
TOGETHER_SECONDS = 5.0


class Terminable(Protocol):
    """An object that is told of a SIGTERM: a lifeline, or an elastic run's membership."""

    @property
    def is_ending(self) -> bool:
        """Whether this process is ending already, and perhaps saves what there is."""

    def announce_termination(self) -> None:
        """Tell the other ranks that this one was sent SIGTERM."""


class Requeueable(Protocol):
    """An object that is told of the signal by which SLURM says that it will start a job again."""

    def announce_requeue(self) -> None:
        """Tell the other ranks that they end here, and that rank 0 has the job requeued."""


class RepeatedSignal:
    """Counts the SIGTERMs that come in one of two ways; one that insists ends the process."""

    def __init__(self) -> None:
        self._first = float("inf")

    def come(self, told: Terminable) -> None:
        """Take note of a signal; end the process at one that comes again after a while."""
        now = monotonic()
        self._first = min(self._first, now)
        insists = now - self._first > TOGETHER_SECONDS
        # The rank may be ending already: mpirun sends the signal repeatedly, and SLURM once more at
        # the end of the grace period, half a minute before it kills.
        if insists and not told.is_ending:
            os._exit(TERMINATED_STATUS)
        told.announce_termination()


def watch_signals_by(signal_fd: int) -> None:
    """Have Python write signals there, where the main thread may run no handler.

    It does nothing outside the main thread, or where an event loop watches already.
    """
    if threading.current_thread() is threading.main_thread():
        before = signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)


def unwatch_signals_by(signal_fd: int) -> None:
    """Undo `watch_signals_by`."""
    if threading.current_thread() is threading.main_thread():
        before = signal.set_wakeup_fd(-1)
        if before != signal_fd:
            signal.set_wakeup_fd(before)


class ConnectionThread(threading.Thread):
    """Keeps one connection with a server: sends what other threads ask it to, beats and listens.

    It ends with the message of kind `goodbye`.
    """

    def __init__(
        self, name: str, timeout_seconds: float, longest_beat_seconds: float, goodbye: str
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._connection: Connection
        self._longest_beat = min(timeout_seconds / 10, longest_beat_seconds)
        self._silence_seconds = 0.7 * timeout_seconds
        self._goodbye = goodbye
        self._requests: deque[Message] = deque()
        self._sigterms = RepeatedSignal()
        self._is_leaving = False
        self._selector = DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, EVENT_READ, self._wake)

    def _keep(self, connection: Connection) -> None:
        self._connection = connection
        self._selector.register(connection, EVENT_READ, self._hear)

    @property
    def signal_fd(self) -> int:
        """Where `signal.set_wakeup_fd` may write which signals come."""
        return self._wake_write.fileno()

    @property
    def _beat_seconds(self) -> float:
        return self._longest_beat

    @property
    def _has_unsent(self) -> bool:
        return self._connection.has_unsent

    @property
    def _goes_on(self) -> bool:
        return not self._is_leaving

    @abstractmethod
    def _tick(self, now: float, seconds: float) -> None:
        """Beat, so many seconds after the last time."""

    @abstractmethod
    def _hear(self) -> None:
        """Take what the server says."""

    @abstractmethod
    def _take_signals(self, signals: bytes) -> None:
        """Take note of signals by their numbers; the main thread may be where no handler runs."""

    @abstractmethod
    def _finish(self) -> None:
        """End what the thread alone uses, as its last act."""

    def send(self, message: Message) -> None:
        """Send a message to the server, from any thread; does nothing once the thread has ended."""
        self._requests.append(message)
        self._wake_up()

    def forget(self) -> None:
        """Let go of the sockets in a forked child, so that they end when the parent does."""
        # Unregistering would reach into the parent's selector, which a fork shares.
        self._selector.close()
        self._close()

    def run(self) -> None:
        """Serve until this process leaves."""
        last_beat = monotonic()
        while self._goes_on:
            for key, _ in self._selector.select(self._patience(last_beat)):
                key.data()
            self._send_requests()
            now = monotonic()
            if now - last_beat >= self._beat_seconds:
                self._tick(now, now - last_beat)
                last_beat = now
        self._finish()

    def _patience(self, last_beat: float) -> float:
        until_beat = max(0.0, last_beat + self._beat_seconds - monotonic())
        return min(until_beat, _UNSENT_SECONDS) if self._has_unsent else until_beat

    def _send_requests(self) -> None:
        while self._requests:
            message = self._requests.popleft()
            self._connection.send(message)
            if message["kind"] == self._goodbye:
                self._is_leaving = True
        self._connection.flush()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake_write.send(_WAKE)

    def _wake(self) -> None:
        """Empty the pipe; a signal's number in it comes from `signal.set_wakeup_fd`."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = self._wake_read.recv(1 << 12)
        self._take_signals(signals)

    def _close(self) -> None:
        self._connection.close()
        self._wake_read.close()
        self._wake_write.close()


class LifelineThread(ConnectionThread):
    """Drives one rank's `Lifeline`, and on rank 0, where `hub` is what listens, the hub."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        token: str,
        hub: Connection | Sequence[socket.socket],
        met_anew: bool = False,
    ) -> None:
        super().__init__("lightning-shard-lifeline", timeout_seconds, _LONGEST_BEAT_SECONDS, "bye")
        self._server: HubServer | None = None
        if not isinstance(hub, Connection):
            self._server = HubServer(hub, token, world_size, self._silence_seconds, self._selector)
            own, other_end = socket.socketpair()
            self._server.admit(Connection(other_end))
            hub = Connection(own)
        self._keep(hub)
        self.lifeline = Lifeline(
            rank=rank,
            world_size=world_size,
            silence_seconds=self._silence_seconds,
            send=self.send,
            interrupt=interrupt_groups,
            now=monotonic(),
            signal_fd=self.signal_fd,
            met_anew=met_anew,
        )
        self.send({"kind": "join", "rank": rank})
        self.lifeline.beat()

    def leave(self) -> None:
        """Say goodbye to the others and end the thread."""
        self.send({"kind": "bye"})
        self.join(_LEAVING_SECONDS)

    @property
    def _has_unsent(self) -> bool:
        return super()._has_unsent or (self._server is not None and self._server.has_unsent)

    @property
    def _beat_seconds(self) -> float:
        if self.lifeline.has_told_of_operations:
            return self._longest_beat
        return min(self._longest_beat, _FIRST_BEAT_SECONDS)

    def _send_requests(self) -> None:
        super()._send_requests()
        if self._server is not None:
            self._server.flush()

    def _tick(self, now: float, seconds: float) -> None:
        was_stopped = seconds > self._silence_seconds / 2
        if was_stopped:
            self.lifeline.forgive(now)
        self.lifeline.tick(now)
        if self._server is not None:
            if was_stopped:
                self._server.hub.forgive(now)
            self._server.tick(now)

    def _hear(self) -> None:
        for message in self._connection.receive():
            self.lifeline.heard(message, monotonic())
        if not self._connection.is_open:
            self._selector.unregister(self._connection)
            self.lifeline.hub_lost()

    def _take_signals(self, signals: bytes) -> None:
        if signal.SIGTERM in signals:
            self._sigterms.come(self.lifeline)
        if self.lifeline.requeue_signal and self.lifeline.requeue_signal in signals:
            self.lifeline.announce_requeue()

    def _finish(self) -> None:
        if self._server is not None:
            self._server.leave()
        self._selector.close()
        self._close()

    def _close(self) -> None:
        super()._close()
        if self._server is not None:
            self._server.close()
