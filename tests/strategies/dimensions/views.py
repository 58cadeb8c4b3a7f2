"""Records of runs that no strategy has made."""

from contextlib import nullcontext
from typing import Any

import torch

from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.strategies.dimensions.dimension import RunView
from tests.strategies.stacks import Stack


def view(module: Stack, mesh: ParallelMesh, **others: Any) -> RunView:
    """Return what a dimension sees of a fit of `module` on rank 0 of a mesh."""
    seen: dict[str, Any] = {
        "module": module,
        "model": module,
        "mesh": mesh,
        "rank": 0,
        "device": torch.device("cpu"),
        "is_fitting": True,
        "layer_sync": None,
        "matches_tags": True,
        "drawn_for_own_data": nullcontext,
        "loss_scale": lambda: 1.0,
        "completed": lambda result: result,
        "forget_activations": lambda: None,
    }
    return RunView(**(seen | others))
