"""Processes that ranks fork, such as the workers of a DataLoader.

A forked process has the forking thread alone. Were it to collect the garbage that its parent has
left, objects would end there whose threads it does not have, a store's or a process group's: they
join those threads, and the process dies of a segmentation fault, or waits for ever.

The same becomes of what Python keeps for each thread, since a child lets go of all threads but one:
there torch remembers DTensors' operations, with the groups of their meshes.
"""

import gc
import os
from functools import cache

from lightning_shard.backends import _c10d


def leave_nothing_to_forks() -> None:
    """Let ranks fork from now on; call on the thread that starts them, before each run."""
    _c10d.forget_dtensor_operations()
    _leave_garbage_to_parents()


@cache
def _leave_garbage_to_parents() -> None:
    os.register_at_fork(after_in_child=gc.freeze)
