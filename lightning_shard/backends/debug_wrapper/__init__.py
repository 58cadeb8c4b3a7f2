"""The mismatch check for real processes: ranks compare what they call before they call it.

    all_reduce ─► DebugGroup ─┬─► Comparer: what every rank calls, through the group's store
                                └─► the inner group (Gloo, NCCL, MPI), once all ranks agree

Else a rank that calls something else than its peers shows as a hang, wrong numbers, or an abort in
C++. Comparing a collective waits for the peers at once, also when it is asynchronous: ranks that
start operations of several groups in different order are told so after the time-out.
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
