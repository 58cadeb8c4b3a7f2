"""What a parallel dimension is told of the run that it is part of."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import Axis, ParallelMesh
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.start import MetaStart


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A strategy's run, as its dimensions see it.

    Attributes:
        module: The user's LightningModule.
        model: What is trained: the module, or what a wrapper has made of it.
        mesh: The grid of the run's ranks.
        rank: Number of this rank in the mesh.
        device: Device of this rank.
        is_fitting: Whether the run trains.
        layer_sync: How batch norms are to be synchronized, where the user asks for it.
        matches_tags: Whether the backend tells messages of one rank apart by their tags.
        groups: This rank's group along each axis of a dimension; there once groups are made.
        of_parts: The ranks that have the same parts of what a dimension with samples of its own
            shares out, and second groups of them for gradients; None without such a dimension.
        with_shards: Inside, weights are the shards that are here, also within a hook.
        in_hook: Inside, code sees weights as hooks do; each rank must enter.
        drawn_for_own_data: Inside, ranks that are given different samples draw random numbers of
            their own.
        loss_scale: Returns what a loss scaler multiplies losses with, shape () if a tensor.
        completed: Makes what a step has returned what any code can take: that of all dimensions.
        forget_activations: Lets go of activations that the layers of any dimension keep.
        start: Knows the values of parameters on meta; None where there are none.
    """

    module: "pl.LightningModule"
    model: nn.Module
    mesh: ParallelMesh
    rank: int
    device: torch.device
    is_fitting: bool
    layer_sync: LayerSync | None
    matches_tags: bool
    groups: Mapping[Axis, Collectives] = field(default_factory=dict)
    of_parts: tuple[DataGroups, DataGroups] | None = None
    with_shards: Callable[[], AbstractContextManager[None]] = nullcontext
    in_hook: Callable[[], AbstractContextManager[None]] = nullcontext
    drawn_for_own_data: Callable[[], AbstractContextManager[None]] = nullcontext
    loss_scale: Callable[[], Tensor | float]
    completed: Callable[[Any], Any]
    forget_activations: Callable[[], None]
    start: MetaStart | None = None


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """A rank's groups in a run whose ranks share models.

    samples      other samples: loaders, random numbers, metrics, logged and gathered values
    gradients    the same parameters, other activations: those above, and ranks that compute other
                 parts of one sample. Engines, their state and batch norms
    of_parts     of those, the ranks that have the same parts of what is shared out: of experts
    model        the same samples: all axes of the dimensions together
    along        each of these axes alone

    Attributes:
        samples: The ranks that are given other samples.
        gradients: Those that average gradients, and how they share out the state.
        model: Those that share one model, and are given the same samples.
        of_parts: Those that average gradients of what is shared out, and second groups of them for
            gradients; None where nothing is.
        along: Those that share it along one axis.
    """

    samples: Collectives
    gradients: DataGroups
    model: Collectives
    along: Mapping[Axis, Collectives]
    of_parts: tuple[DataGroups, DataGroups] | None = None
