"""What a CPU rank frees stays with its process, for the next step.

    glibc by itself    gives back what is freed at the end of its heap, and blocks of their own
    the next step      faults it in again, 4 KB at a time: 29 MB of a step of 3.4 million parameters

Under torch DDP gradients lie at the end of the heap from step to step, and hold all of it. Here
they move into flat buffers, so that the end of a backward frees everything. Between steps a rank
then holds what a step needs: under stages 1 to 3 the benchmark's GPT 400 to 440 MB, at peaks of as
many, and with glibc by itself 370 to 450, at peaks of 400 to 480. Of 3.4 million parameters in
small layers it is 165 to 194 MB beside 139 to 158, at peaks of 158 to 179. Whoever sets glibc's
variables keeps their values.

Threads other than the main one, on which Ray trains, say, have heaps of 64 MB each, and glibc
unmaps one that is empty, whatever its threshold, unless the one before has less room than the
padding: a fit of the benchmark's GPT on such a thread faulted in 35 to 50 MB a step, and took 1.03
times as long. So the padding is a whole heap: addresses, which take no memory until written.
"""

import ctypes
import os
from functools import cache

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_LONGEST_END = 2**31 - 1  # bytes at the end of the heap: the most that mallopt's int says
_HEAP_BYTES = 64 << 20  # of a thread's heaps
LARGEST_BLOCK_BYTES = 32 << 20  # the most that glibc takes; larger ones are mapped each time
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(device: torch.device) -> None:
    """Let a process whose rank computes on the CPU keep what it frees, up to 2 GiB of it."""
    if device.type == "cpu":
        _keep()


@cache
def _keep() -> bool:
    """Set glibc's thresholds once in a process; return whether they were set."""
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in chosen:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not where the C library is another
    if mallopt is None:
        return False
    values = (
        (_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES),
        (_TRIM_THRESHOLD, _LONGEST_END),
        (_TOP_PAD, _HEAP_BYTES),
    )
    return all(mallopt(*one) for one in values)
