"""A file that goes to the disk while it is written, in memory of a few buffers.

    write    copies into a buffer; a full one goes to a thread          ┌ buffer ┐ being filled
    threads  have the disk fetch it from there, past the page cache     │ buffer │ on its way
    finish   waits for them, writes the rest, flushes                   └ buffer ┘ on its way

A save would otherwise fill the page cache with what nobody reads again, at the cost of a copy and
of fresh memory for all of it, and wait at its end until the disk has it. Where a filesystem knows
no direct writes (`O_DIRECT`: tmpfs, some network filesystems), the same buffers go the ordinary
way.
"""

import errno
import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, fcntl
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
from typing_extensions import override

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 3
_OWN = MAP_PRIVATE | MAP_ANONYMOUS
_NUM_THREADS = 2  # so that the disk always has something to do
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # of direct writes that are not as it wants them


class DiskFile(io.RawIOBase):
    """A new file, which is written from its beginning to its end.

    Args:
        path: Where it is made; nothing may be there.

    Attributes:
        failure: Why something could not be written: who writes may raise something else.

    Raises:
        OSError: It cannot be made.
    """

    failure: OSError | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = -1  # `close` is called of what could not be made, too
        self._begin, self._used = 0, 0  # of the buffer that is being filled, in the file; its bytes
        self._filled, *self._idle = (
            np.frombuffer(mmap(-1, BUFFER_BYTES, flags=_OWN), np.uint8) for _ in range(NUM_BUFFERS)
        )
        self._on_their_way: deque[tuple[Future[None], Any]] = deque()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="disk-file")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        _write_directly(self._descriptor)

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._begin + self._used

    @override
    def fileno(self) -> int:
        return self._descriptor

    @override
    def write(self, data: Any, /) -> int:
        """Write all of some bytes; what earlier ones have met with may be raised here.

        Raises:
            OSError: The operating system has refused something.
        """
        view, done = memoryview(data), 0
        content = view.cast("B") if view.nbytes else b""
        while done < len(content):
            part = content[done : done + BUFFER_BYTES - self._used]
            self._filled[self._used : self._used + len(part)] = np.frombuffer(part, np.uint8)
            self._used += len(part)
            done += len(part)
            if self._used == BUFFER_BYTES:
                self._hand_over()
        return done

    def finish(self) -> None:
        """Have all of it on the disk.

        Raises:
            OSError: The operating system has refused something.
        """
        while self._on_their_way:
            self._take_back()
        if self.failure is not None:
            raise self.failure
        try:
            _write_indirectly(self._descriptor)  # the rest may have any length
            _write_all(self._descriptor, self._filled.data[: self._used], self._begin)
            os.fsync(self._descriptor)
        except OSError as error:
            self.failure = error
            raise

    @override
    def close(self) -> None:
        """Let go of the file; what was not finished may be missing."""
        if not self.closed:
            self._threads.shutdown(cancel_futures=True)
            if self._descriptor >= 0:
                os.close(self._descriptor)
        super().close()

    def _hand_over(self) -> None:
        """Let a thread write the buffer that is full, and have another one to fill."""
        full = self._filled
        job = self._threads.submit(_write_all, self._descriptor, full.data, self._begin)
        self._on_their_way.append((job, full))
        self._begin, self._used = self._begin + BUFFER_BYTES, 0
        if not self._idle:
            self._take_back()
        self._filled = self._idle.pop()

    def _take_back(self) -> None:
        """Wait for the buffer that was handed over first."""
        job, buffer = self._on_their_way.popleft()
        self._idle.append(buffer)
        try:
            job.result()
        except OSError as error:
            self.failure = error
            raise


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        was_direct = _is_direct(descriptor)  # the other thread may change it
        try:
            done += os.pwrite(descriptor, content[done:], offset + done)
        except OSError as error:  # also of the rest of a write that was cut short
            if error.errno not in _REFUSED or not was_direct:
                raise
            _write_indirectly(descriptor)


def _write_directly(descriptor: int) -> None:
    with suppress(OSError):  # not every filesystem can
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | _DIRECT)


def _write_indirectly(descriptor: int) -> None:
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~_DIRECT)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl(descriptor, F_GETFL) & _DIRECT)
