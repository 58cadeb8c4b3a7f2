"""The group of all ranks, and an engine over it."""

from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions


def all_ranks(backend: str = "in_process") -> Collectives:
    """Return the collectives of all ranks; each must have joined them."""
    assert dist.group.WORLD is not None
    return get_backend(backend).collectives(dist.group.WORLD)


def engine_of(model: nn.Module, **options: Any) -> DataParallelEngine:
    """Return an engine of a model over all ranks of this process, with these options."""
    return DataParallelEngine(model, all_ranks(), EngineOptions(**options))
