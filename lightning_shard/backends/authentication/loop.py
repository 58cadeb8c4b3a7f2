"""The loop in which a thread serves connections, and other parts.

what comes in ────────────> the functions that the parts have registered
what is due ──────────────> each part's tick, and what it has not sent yet
other threads, signals ───> a pipe, which wakes the loop
"""

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from weakref import WeakSet

_UNSENT_SECONDS = 0.01
_LEAVING_SECONDS = 5.0
_WAKE = b"\0"  # no signal's number


class LoopPart:
    """One of the things that a loop serves; it registers its sockets in the loop's selector."""

    @property
    def tick_seconds(self) -> float:
        """How many seconds lie between two ticks."""
        return 1.0

    def tick(self, now: float, seconds: float) -> None:
        """Let time pass: so many seconds since the last tick."""

    def flush(self) -> bool:
        """Send what the system takes of what was said; return whether some has to leave yet."""
        return False

    def close(self) -> None:
        """Close every socket; in a forked child, too."""


_loops: "WeakSet[Loop]" = WeakSet()


class Loop(threading.Thread):
    """Serves its parts: on a thread of its own once that is started, else by `turn`.

    Attributes:
        selector: Calls what is registered with a socket, when that has something to read.
        signal_fd: Where `signal.set_wakeup_fd` may write which signals come.
        take_signals: Is told of them, by their numbers.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.selector = DefaultSelector()
        self.take_signals: Callable[[bytes], object] = lambda signals: None
        self._ticked: dict[LoopPart, float] = {}  # by part, when it last has
        self._has_unsent = False
        self._calls: deque[Callable[[], object]] = deque()
        self._ends = False
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self.signal_fd = self._wake_write.fileno()
        self.selector.register(self._wake_read, EVENT_READ, self._wake)
        _loops.add(self)

    def add(self, *parts: LoopPart) -> None:
        """Serve these from now on; called where the loop runs, or before it does."""
        self._ticked |= dict.fromkeys(parts, monotonic())

    def remove(self, part: LoopPart) -> None:
        """Serve this part no more."""
        self._ticked.pop(part, None)

    def turn(self) -> None:
        """Wait until something comes in or is due, and do it."""
        for key, _ in self.selector.select(self._patience()):
            key.data()
        while self._calls:
            self._calls.popleft()()
        now = monotonic()
        for part, last in list(self._ticked.items()):
            if now - last >= part.tick_seconds:
                self._ticked[part] = now
                part.tick(now, now - last)
        self._has_unsent = False
        for part in self._ticked:
            self._has_unsent |= part.flush()

    def _patience(self) -> float | None:
        """Return how many seconds the loop may wait; None for as long as it takes."""
        due = [last + part.tick_seconds for part, last in self._ticked.items()]
        if self._has_unsent:
            due.append(monotonic() + _UNSENT_SECONDS)
        return max(0.0, min(due) - monotonic()) if due else None

    @property
    def is_ending(self) -> bool:
        """Whether the thread was asked to end."""
        return self._ends

    def call(self, function: Callable[[], object]) -> None:
        """Have the thread call this soon, in the order of the calls; from any thread."""
        self._calls.append(function)
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._wake_write.send(_WAKE)

    def run(self) -> None:
        """Serve until `end`."""
        while not self._ends:
            self.turn()
        self.forget()

    def call_and_wait(self, function: Callable[[], object]) -> None:
        """Have the thread call this, and wait until it has."""
        is_done = threading.Event()
        self.call(function)
        self.call(is_done.set)
        is_done.wait(_LEAVING_SECONDS)

    def ask_to_end(self) -> None:
        """Have the thread close what it serves and end, when it has made the calls before this."""
        self.call(lambda: setattr(self, "_ends", True))

    def end(self) -> None:
        """End the thread, and wait until it has closed what it serves."""
        self.ask_to_end()
        if self.is_alive():
            self.join(_LEAVING_SECONDS)
        else:
            self.forget()

    def forget(self) -> None:
        """Close the sockets; in a forked child those of the parent."""
        # Unregistering would reach into a parent's selector, which a fork shares.
        self.selector.close()
        for part in self._ticked:
            part.close()
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        """Empty the pipe; a signal's number in it comes from `signal.set_wakeup_fd`."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            signals = self._wake_read.recv(1 << 12)
        self.take_signals(signals)


def _forget_in_child() -> None:
    """A forked child (a DataLoader's worker) is no rank, and must not keep the sockets open."""
    for loop in list(_loops):
        loop.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
