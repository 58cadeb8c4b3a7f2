"""Waking a process that sleeps: a word of shared memory on which it waits, by Linux's futex.

A rank that waits spins a little, yields its core, and then sleeps here until a peer has news. Who
has news writes its board first and rings then; ringing costs nothing while nobody sleeps.
"""

import ctypes
import platform
from mmap import mmap
from threading import Lock
from time import perf_counter_ns

NUM_BYTES = 8
SYSTEM_CALLS = {"x86_64": 202}  # of `futex`, by machine
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbell:
    """The doorbell of one process, as itself or a peer has it mapped.

    Args:
        memory: The process's heap, which begins with the doorbell.
    """

    def __init__(self, memory: mmap) -> None:
        self._words = memoryview(memory)[:NUM_BYTES].cast("I")  # changes at each ring; sleepers
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = SYSTEM_CALLS.get(platform.machine(), -1)
        self._lock = Lock()
        self._sleepers = 0

    def listen(self) -> int:
        """Say that this process may sleep soon; return the word for `sleep`.

        Look once more for news between the two, and call `end_sleep` in the end.
        """
        with self._lock:
            self._sleepers += 1
            self._words[1] = self._sleepers
        return self._words[0]

    def sleep(self, word: int, seconds: float) -> None:
        """Sleep until somebody rings, unless that has happened since `listen`, or for so long."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        self._futex(_WAIT, word, ctypes.byref(limit))

    def end_sleep(self) -> None:
        """Say that this process is awake."""
        with self._lock:
            self._sleepers -= 1
            self._words[1] = self._sleepers

    def ring(self) -> None:
        """Wake the process, if it sleeps."""
        if self._words[1]:
            self._words[0] = perf_counter_ns() & 0xFFFFFFFF
            self._futex(_WAKE, _EVERYBODY, None)

    def _futex(self, operation: int, value: int, limit: object) -> None:
        self._system_call(
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._address),
            ctypes.c_int(operation),
            ctypes.c_uint(value),
            limit,
            None,
            ctypes.c_int(0),
        )
