"""The mismatch check for real processes: ranks compare what they call before they call it.

    all_reduce ─► DebugGroup ─┬─► Comparer: what every rank calls, through the group's store
                                └─► the inner group (Gloo, NCCL, MPI), once all ranks agree

Without it a rank that calls something else than its peers shows as a hang, as wrong numbers, or as
an abort in C++. With it every rank of the group raises `CollectiveMismatchError`, which names both
operations and where they were called. c10d knows the checked groups by names of their own, so that
the user's own calls, DTensor, and every sub-group are checked as well. It costs a few round trips
to the store for each operation, so it is meant for the search for a mistake.

Comparing a collective waits for the peers at once, also when it is asynchronous: ranks that start
operations of several groups in different order wait for each other, and are told so after the
time-out. Two NCCL ranks that each send and receive in one batch may do so as well, since c10d
batches such calls on its own groups alone.
"""

from lightning_shard.backends.debug_wrapper.process_group import (
    DebugExchange,
    DebugGroup,
    MakeGroup,
    debug_name,
    exchange_collectives,
    register_debug,
)

__all__ = [
    "DebugExchange",
    "DebugGroup",
    "MakeGroup",
    "debug_name",
    "exchange_collectives",
    "register_debug",
]
