"""Processes that ranks fork, such as the workers of a DataLoader.

A forked process has the forking thread alone. Were it to collect the garbage that its parent has
left, objects would end there whose threads it does not have, a store's or a process group's: they
join those threads, and the process dies of a segmentation fault.
"""

import gc
import os
from functools import cache


@cache
def leave_garbage_to_parents() -> None:
    """Have processes that are forked from now on collect no garbage of this one; once is enough."""
    os.register_at_fork(after_in_child=gc.freeze)
