"""The one thread of a process that keeps its lifeline: beats, listens, and serves the hub."""

import contextlib
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from selectors import EVENT_READ, DefaultSelector
from time import monotonic

from lightning_shard.backends.guarded.connection import Connection, Message
from lightning_shard.backends.liveness.interruption import interrupt_groups
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.server import HubServer
from lightning_shard.backends.liveness.termination import RepeatedSignal

_LONGEST_BEAT_SECONDS = 5.0
_FIRST_BEAT_SECONDS = 0.25  # until the hub knows that this rank has begun
_UNSENT_SECONDS = 0.01
_LEAVING_SECONDS = 5.0
_WAKE = b"\0"  # no signal's number


class LifelineThread(threading.Thread):
    """Drives one rank's `Lifeline`, and on rank 0 the hub.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        timeout_seconds: Time-out of the process groups; a silent rank is given up before that.
        token: The job's token, which each rank must know.
        hub: The connection to the hub; on rank 0 the sockets where it listens.
        met_anew: Whether this is a reconfiguration: the ranks have trained in another group before.

    Attributes:
        lifeline: This rank's end of the lifeline, which the process's other threads ask.
    """

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
        super().__init__(name="lightning-shard-lifeline", daemon=True)
        self._beat_seconds = min(timeout_seconds / 10, _LONGEST_BEAT_SECONDS)
        self._silence_seconds = 0.7 * timeout_seconds
        self._selector = DefaultSelector()
        self._requests: deque[Message] = deque()
        self._sigterms = RepeatedSignal()
        self._is_leaving = False
        self._server: HubServer | None = None
        if not isinstance(hub, Connection):
            self._server = HubServer(hub, token, world_size, self._silence_seconds, self._selector)
            own, other_end = socket.socketpair()
            self._server.add(Connection(other_end))
            hub = Connection(own)
        self._to_hub = hub
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._to_hub, EVENT_READ, self._hear_hub)
        self._selector.register(self._wake_read, EVENT_READ, self._wake)
        self.lifeline = Lifeline(
            rank=rank,
            world_size=world_size,
            silence_seconds=self._silence_seconds,
            send=self._request,
            interrupt=interrupt_groups,
            now=monotonic(),
            signal_fd=self._wake_write.fileno(),
            met_anew=met_anew,
        )
        self._request({"kind": "join", "rank": rank})
        self.lifeline.beat()

    def leave(self) -> None:
        """Say goodbye to the others and end the thread."""
        self._request({"kind": "bye"})
        self.join(_LEAVING_SECONDS)

    def forget(self) -> None:
        """Let go of the sockets in a forked child, so that they end when the parent does."""
        # Unregistering would reach into the parent's selector, which a fork shares.
        self._selector.close()
        self._close()

    def run(self) -> None:
        """Serve until this rank leaves."""
        last_tick = monotonic()
        while not self._is_leaving:
            for key, _ in self._selector.select(self._patience(last_tick)):
                key.data()
            self._send_requests()
            now = monotonic()
            if now - last_tick >= self._until_beat:
                self._tick(now, now - last_tick)
                last_tick = now
        if self._server is not None:
            self._server.leave()
        self._selector.close()
        self._close()

    def _patience(self, last_tick: float) -> float:
        has_unsent = self._to_hub.has_unsent or (
            self._server is not None and self._server.has_unsent
        )
        until_tick = max(0.0, last_tick + self._until_beat - monotonic())
        return min(until_tick, _UNSENT_SECONDS) if has_unsent else until_tick

    @property
    def _until_beat(self) -> float:
        if self.lifeline.has_told_of_operations:
            return self._beat_seconds
        return min(self._beat_seconds, _FIRST_BEAT_SECONDS)

    def _request(self, message: Message) -> None:
        self._requests.append(message)
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake_write.send(_WAKE)

    def _send_requests(self) -> None:
        while self._requests:
            message = self._requests.popleft()
            self._to_hub.send(message)
            if message["kind"] == "bye":
                self._is_leaving = True
        self._to_hub.flush()
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

    def _hear_hub(self) -> None:
        for message in self._to_hub.receive():
            self.lifeline.heard(message, monotonic())
        if not self._to_hub.is_open:
            self._selector.unregister(self._to_hub)
            self.lifeline.hub_lost()

    def _wake(self) -> None:
        """Empty the pipe; a signal's number in it comes from `signal.set_wakeup_fd`."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = self._wake_read.recv(1 << 12)
        if signal.SIGTERM in signals:
            self._sigterms.come(self.lifeline)  # the main thread may be where no handler runs
        if self.lifeline.requeue_signal and self.lifeline.requeue_signal in signals:
            self.lifeline.announce_requeue()

    def _close(self) -> None:
        self._to_hub.close()
        self._wake_read.close()
        self._wake_write.close()
        if self._server is not None:
            self._server.close()
