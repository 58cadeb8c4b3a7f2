"""Experts on simulated ranks: each expert is taken to get as many tokens as any other.

Which experts tokens go to is known from their elements alone, which a dry run has not. Products of
groups of matrices know no shape of theirs but in bfloat16, so they are asked in that format.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.torch_private import TorchDispatchMode
from lightning_shard.expert_parallel.finding import find_mixtures
from lightning_shard.expert_parallel.shared_experts import SharedExperts
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.mesh import ParallelMesh
from lightning_shard.planner.simulated_group import SimulatedCollectives


def split_experts(module: nn.Module, mesh: ParallelMesh) -> ExpertSplit:
    """Leave a module the experts of the first rank, to which its own and its peers' tokens go.

    Args:
        module: A module without elements, which is changed.
        mesh: Grid of the simulated ranks.
    """
    group = SimulatedCollectives(0, mesh.size("ep"))
    data = DataGroups.of(SimulatedCollectives(0, mesh.dp * mesh.cp))
    mixtures = find_mixtures(module)
    split = ExpertSplit(module, mixtures, group, data, data)
    SharedExperts(mixtures, split, nullcontext, is_dry=True, tries=False)
    return split


class ProductsOfGroups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies groups of matrices without elements in any format."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Ask for the shapes of a product in bfloat16."""
        kwargs = dict(kwargs or {})
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **kwargs)
        left, right, *rest = args
        result = func(left.bfloat16(), right.bfloat16(), *rest, **kwargs)
        return result.to(left.dtype)
