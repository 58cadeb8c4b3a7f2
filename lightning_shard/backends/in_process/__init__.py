"""Ranks as threads of one process, one running at a time, switched at collectives.

run_ranks / launcher ─► World.run ─► RanksRun ─► Scheduler (the token, deadlocks)
                            │                         └─ RankGlobals (swapped at each switch)
torch.distributed ─► InProcessGroup ─► World.post ─► Channel ─► SEMANTICS (the arithmetic)
                            └─ InProcessWork.wait ─► Scheduler.wait
"""

from lightning_shard.backends.in_process.backend import InProcessBackend
from lightning_shard.backends.in_process.channel import like_gloo
from lightning_shard.backends.in_process.elastic_world import ElasticWorld
from lightning_shard.backends.in_process.faults import Fault, injected_faults
from lightning_shard.backends.in_process.scheduler import Failure
from lightning_shard.backends.in_process.world import World, current_rank, current_world

__all__ = [
    "ElasticWorld",
    "Failure",
    "Fault",
    "InProcessBackend",
    "World",
    "current_rank",
    "current_world",
    "injected_faults",
    "like_gloo",
]
