"""The lifeline: a control connection beside the data, by which ranks know of each other's end.

                          rank 0
    rank 1 ─── lifeline ──> hub <── lifeline ─── rank 2        one thread in each process
       └──────── data ───────┴──────── data ───────┘           Gloo, NCCL, MPI

Transports notice a dead peer late, or not at all, and never say which rank it was. A connection
that ends without a goodbye is a death, one that is silent for long a stopped process; a rank that
raises says so. The first of these is the verdict, which interrupts what every rank waits for.
"""

from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.meeting import (
    KeyValueStore,
    current,
    start,
    stop,
    stop_at_exit,
    unwatch_signals,
    watch_signals,
)
from lightning_shard.backends.liveness.thread import (
    TERMINATED_STATUS,
    RepeatedSignal,
    Requeueable,
    Terminable,
)

__all__ = [
    "TERMINATED_STATUS",
    "KeyValueStore",
    "Lifeline",
    "RepeatedSignal",
    "Requeueable",
    "Terminable",
    "current",
    "start",
    "stop",
    "stop_at_exit",
    "unwatch_signals",
    "watch_signals",
]
