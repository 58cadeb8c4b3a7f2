"""Heartbeats: the thread that keeps a process connected to its job's rendezvous server.

    member ──beat, every second at most──> server     a silent member is declared dead
    member <──beat, every second at most── server     a silent server is given up

Whatever else the two tell each other goes over the same connection.
"""

import contextlib
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from weakref import finalize

from lightning_shard.backends.guarded.connection import Connection, Message
from lightning_shard.backends.liveness import RepeatedSignal

_LONGEST_BEAT_SECONDS = 1.0
_UNSENT_SECONDS = 0.01
LONGEST_START_SECONDS = 60.0
_LEAVING_SECONDS = 5.0
_WAKE = b"\0"  # no signal's number


class HeartbeatThread(threading.Thread):
    """Sends one process's heartbeats and messages, and hears the server's.

    Args:
        server: The connection to the rendezvous server.
        timeout_seconds: How long ranks wait for each other in a group; a server that is silent for
            most of it is given up.
        hear: Called with each message of the server.
        on_server_lost: Called with what has become of the server: "died", "fell silent ...".
        ask_to_leave: Called at the first SIGTERM; a later one ends the process.
    """

    def __init__(
        self,
        server: Connection,
        timeout_seconds: float,
        hear: Callable[[Message], None],
        on_server_lost: Callable[[str], None],
        ask_to_leave: Callable[[], None],
    ) -> None:
        super().__init__(name="lightning-shard-membership", daemon=True)
        self.own_address = server.own_address
        self._beat_seconds = min(timeout_seconds / 10, _LONGEST_BEAT_SECONDS)
        self._silence_seconds = 0.7 * timeout_seconds
        self._server = server
        self._hear_message = hear
        self._on_server_lost = on_server_lost
        self._ask_to_leave = ask_to_leave
        self._sigterms = RepeatedSignal()
        self._requests: deque[Message] = deque()
        # A rendezvous server that has just been started is imported still: that is no silence.
        self._server_heard = monotonic() + LONGEST_START_SECONDS
        self._is_leaving = False
        self._selector = DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
            finalize(self, end.close)  # of one that ended by itself: see `run`
        self._selector.register(self._server, EVENT_READ, self._hear)
        self._selector.register(self._wake_read, EVENT_READ, self._wake)

    @property
    def signal_fd(self) -> int:
        """Where `signal.set_wakeup_fd` may write which signals come."""
        return self._wake_write.fileno()

    def send(self, message: Message) -> None:
        """Send a message to the server, from any thread; does nothing once the thread has ended."""
        self._requests.append(message)
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake_write.send(_WAKE)

    def leave(self, message: Message) -> None:
        """Send a last message and end the thread; signals must be written elsewhere by now."""
        if self.is_alive():
            self.send(message)
            self.join(_LEAVING_SECONDS)
        if not self.is_alive():
            self._close()

    def forget(self) -> None:
        """Let go of the sockets in a forked child, so that they end when the parent does."""
        # Unregistering would reach into the parent's selector, which a fork shares.
        self._selector.close()
        self._close()

    def come(self) -> None:
        """Take note of a SIGTERM, from a handler."""
        self._sigterms.come(self)

    @property
    def is_ending(self) -> bool:
        """Whether the process is ending already, so that a second signal changes nothing."""
        return self._is_leaving

    def announce_termination(self) -> None:
        """Have this rank leave; `RepeatedSignal` says when."""
        self._ask_to_leave()

    def run(self) -> None:
        """Serve until this process leaves, or the server is lost."""
        last_beat = monotonic()
        while not self._is_leaving and self._server.is_open:
            for key, _ in self._selector.select(self._patience(last_beat)):
                key.data()
            self._send_requests()
            now = monotonic()
            if now - last_beat >= self._beat_seconds:
                self._tick(now, now - last_beat)
                last_beat = now
        self._selector.close()
        self._server.close()  # the pipe stays: signals are still written to it

    def _patience(self, last_beat: float) -> float:
        until_beat = max(0.0, last_beat + self._beat_seconds - monotonic())
        return min(until_beat, _UNSENT_SECONDS) if self._server.has_unsent else until_beat

    def _tick(self, now: float, seconds: float) -> None:
        self._server.send({"kind": "beat"})
        if seconds > self._silence_seconds / 2:  # this process was stopped
            self._server_heard = max(self._server_heard, now)
        elif now - self._server_heard > self._silence_seconds:
            self._on_server_lost(f"fell silent for {now - self._server_heard:.1f} s")
            self._server.is_open = False

    def _send_requests(self) -> None:
        while self._requests:
            message = self._requests.popleft()
            self._server.send(message)
            if message["kind"] == "leave":
                self._is_leaving = True
        self._server.flush()

    def _hear(self) -> None:
        for message in self._server.receive():
            self._server_heard = monotonic()
            self._hear_message(message)
        if not self._server.is_open:
            self._on_server_lost("died")

    def _wake(self) -> None:
        """Empty the pipe; a signal's number in it comes from `signal.set_wakeup_fd`."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = self._wake_read.recv(1 << 12)
        if signal.SIGTERM in signals:
            self.come()  # the main thread may be where no handler runs

    def _close(self) -> None:
        self._server.close()
        self._wake_read.close()
        self._wake_write.close()
