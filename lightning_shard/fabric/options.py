"""The options of the strategies for Fabric: the same groups as a Trainer's strategies take."""

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from typing_extensions import TypedDict

from lightning_shard.strategies.options import GradientOptions, RanksOptions, ShardOptions


class FabricLightningOptions(TypedDict, total=False):
    """What Fabric's own parallel strategies take.

    Attributes:
        accelerator: Lightning's; Fabric sets it.
        parallel_devices: One device per local rank; Fabric sets them.
        cluster_environment: Lightning's; Fabric finds it when it is left out.
        checkpoint_io: Lightning's; it writes and reads the files.
        precision: Lightning's plugin; Fabric makes it of its own `precision`.
    """

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision: Precision | None


class FabricRanksOptions(FabricLightningOptions, RanksOptions, total=False):
    """What every strategy of Fabric takes."""


class FabricOptions(FabricRanksOptions, GradientOptions, ShardOptions, total=False):
    """What replicated data parallel and ZeRO take under Fabric."""
