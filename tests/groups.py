"""The group of all ranks, and an engine over it."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from tests.processes import rank_and_world_size


def all_ranks(backend: str = "in_process") -> Collectives:
    """Return the collectives of all ranks; each must have joined them."""
    assert dist.group.WORLD is not None
    return get_backend(backend).collectives(dist.group.WORLD)


def join(backend: str = "gloo", seconds: float = 60) -> Collectives:
    """Join the other processes of `run_processes`; return the collectives of all ranks."""
    rank, size = rank_and_world_size()
    get_backend(backend).init_process_group(
        rank=rank, world_size=size, device=torch.device("cpu"), timeout=timedelta(seconds=seconds)
    )
    return all_ranks(backend)


def engine_of(model: nn.Module, **options: Any) -> DataParallelEngine:
    """Return an engine of a model over all ranks of this process, with these options."""
    return DataParallelEngine(model, all_ranks(), EngineOptions(**options))
