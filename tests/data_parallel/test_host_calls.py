"""Python that a step runs on the host, counted: what a parameter and a unit may cost.

The counts are the same in every run; `python -m tests.benchmarks.host_overhead` has them over Gloo,
with the times. A count that has grown is work done parameter by parameter that can be done for all
of a buffer at once, or once for all steps.
"""

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.benchmarks.host_overhead import IdleModel, Size, count_calls, idle_batch

UNIT_BY_UNIT = 1e-9
STEPS_BEFORE = 3


def calls_of_a_step(stage: int | None, size: Size) -> int:
    """Count the calls of one step; None trains without an engine. Each rank calls."""
    model = IdleModel(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is None:
        return _count(lambda: _step(model, optimizer, None))
    assert dist.group.WORLD is not None
    ranks = get_backend("in_process").collectives(dist.group.WORLD)
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=stage, bucket_mb=UNIT_BY_UNIT))
    ShardedOptimizer(optimizer, engine)
    return _count(lambda: _step(model, optimizer, engine))
