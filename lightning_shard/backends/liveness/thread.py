"""Connections that a thread keeps with a server: beats, messages, and signals.

Each process keeps one with its hub, the lifeline, and a member of an elastic job one with the
rendezvous server, too. SIGTERM comes here, where the main thread may run no handler.
"""

import os
import signal
import threading
from functools import partial
from selectors import EVENT_READ
from time import monotonic
from typing import Protocol

from typing_extensions import override

from lightning_shard.backends.authentication.connection import Connection, Message
from lightning_shard.backends.authentication.loop import Loop, LoopPart

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


class Listener(Terminable, Requeueable, Protocol):
    """An object that a kept connection is for: a lifeline, or an elastic run's membership."""

    requeue_signal: int
    """The signal by which SLURM says that it will start the job again; 0 for none."""

    @property
    def longest_beat_seconds(self) -> float:
        """How many seconds lie between two beats at most."""

    def tick(self, now: float) -> None:
        """Beat."""

    def heard(self, message: Message, now: float) -> None:
        """Take note of what the server has said."""

    def server_lost(self, event: str) -> None:
        """Take note that the server "died" or "fell silent for ..."; it may come repeatedly."""


class KeptConnection(LoopPart):
    """One end of a connection with a server: beats, listens, and notices the server's silence."""

    def __init__(
        self, connection: Connection, timeout_seconds: float, heard: float | None = None
    ) -> None:
        self.silence_seconds = 0.7 * timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._connection = connection
        self._heard = monotonic() if heard is None else heard
        self._sigterms = RepeatedSignal()
        self._listener: Listener
        self._thread: Loop

    def keep(self, thread: Loop, listener: Listener) -> None:
        """Have a thread keep this connection for a listener; to be called once."""
        self._thread, self._listener = thread, listener

        def begin() -> None:
            thread.take_signals = self._take_signals
            thread.selector.register(self._connection, EVENT_READ, self._hear)
            thread.add(self)

        thread.call(begin)

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return self._connection.own_address

    def send(self, message: Message) -> None:
        """Send a message to the server, from any thread; does nothing once the thread has ended."""
        self._thread.call(partial(self._connection.send, message))

    def leave(self) -> None:
        """Close the connection, from another thread."""
        self._thread.call_and_wait(self._leave)

    def _leave(self) -> None:
        self._thread.remove(self)
        self.drop()

    def drop(self) -> None:
        """Close the connection, on the thread that keeps it."""
        if self._connection.fileno() >= 0:
            self._thread.selector.unregister(self._connection)
            self._connection.close()

    @property
    @override
    def tick_seconds(self) -> float:
        return min(self._timeout_seconds / 10, self._listener.longest_beat_seconds)

    @override
    def flush(self) -> bool:
        self._connection.flush()
        return self._connection.has_unsent

    @override
    def tick(self, now: float, seconds: float) -> None:
        if seconds > self.silence_seconds / 2:  # this process was stopped
            self._heard = max(self._heard, now)
        self._listener.tick(now)
        if now - self._heard > self.silence_seconds:
            self._listener.server_lost(f"fell silent for {now - self._heard:.1f} s")

    @override
    def close(self) -> None:
        self._connection.close()

    def _take_signals(self, signals: bytes) -> None:
        listener = self._listener
        if signal.SIGTERM in signals:
            self._sigterms.come(listener)
        if listener.requeue_signal and listener.requeue_signal in signals:
            listener.announce_requeue()

    def _hear(self) -> None:
        for message in self._connection.receive():
            self._heard = monotonic()
            self._listener.heard(message, self._heard)
        if not self._connection.is_open:
            self.drop()
            self._listener.server_lost("died")
