"""Every contender by name.

| name                     | what                                                             |
|--------------------------|------------------------------------------------------------------|
| `ddp`, `ddp_again`       | torch DDP, twice: the difference of the two is the noise         |
| `ddp_bucket_view`        | torch DDP with `gradient_as_bucket_view=True`                    |
| `zero_redundancy`        | torch DDP and ZeroRedundancyOptimizer, parameters as bucket view |
| `fsdp2`, `fsdp2_reshard` | FSDP2 per block, without and with resharding after forward       |
| `fsdp2_checkpointed`     | FSDP2, resharding, with `torch.utils.checkpoint` around blocks   |
| `zero3_checkpointed`     | ours, stage 3, with activation checkpointing of all blocks       |
| `local`                  | no communication (its losses differ, and may)                    |
| `local_shard`            | the same, and 1/N of the parameters is updated: the floor of 1-3 |
| `shard_ddp`, `zero1-3`   | ours, stages 0 to 3                                              |
| the same with `_shm`     | ours on shared memory                                            |
| the same with `_mpi`     | ours over MPI: mpirun starts the ranks then, also for the others |
| the same with `_auto`    | ours with `bucket_mb="auto"`                                     |
| `deepspeed1` to `3`      | DeepSpeed's stages, where it is installed                        |
| `fit_ddp`                | Lightning's `ddp`, in a Trainer's fit                            |
| `fit_shard_ddp` etc.     | ours, in a Trainer's fit                                         |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy as LightningDDP
from torch import nn

from lightning_shard import DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.data_parallel.options import EngineOptions
from tests.benchmarks.contenders import (
    CheckpointedFSDP2,
    CheckpointedSharded,
    Contender,
    Local,
    LocalShard,
    Sharded,
    TorchDDP,
    TorchFSDP2,
    TorchZeroRedundancy,
)
from tests.benchmarks.deepspeed_zero import DeepSpeedZeRO, is_installed
from tests.benchmarks.fitted import Fitted

_QUIET: dict[str, Any] = {"announce": False}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How to make a contender, and what to say of it."""

    make: Callable[[nn.Module], Contender]
    label: str
    in_default_run: bool = True
    same_losses: bool = True
    devices: Sequence[str] = ("cpu", "cuda")
    needs_mpi: bool = False


CONTENDERS: dict[str, Entry] = {
    "ddp": Entry(make=TorchDDP, label="torch DDP"),
    "ddp_again": Entry(make=TorchDDP, label="torch DDP again (noise)"),
    "ddp_bucket_view": Entry(
        make=lambda model: TorchDDP(model, bucket_view=True),
        label="torch DDP, bucket view",
        in_default_run=False,
    ),
    "zero_redundancy": Entry(make=TorchZeroRedundancy, label="torch ZeroRedundancyOptimizer"),
    "fsdp2": Entry(
        make=lambda model: TorchFSDP2(model, reshard=False), label="FSDP2, no resharding"
    ),
    "fsdp2_reshard": Entry(
        make=lambda model: TorchFSDP2(model, reshard=True), label="FSDP2, resharding"
    ),
    "fsdp2_checkpointed": Entry(
        make=lambda model: CheckpointedFSDP2(model, reshard=True), label="FSDP2, checkpointed"
    ),
    "local": Entry(make=Local, label="no communication", same_losses=False),
    "local_shard": Entry(
        make=LocalShard,
        label="no communication, a shard's update",
        in_default_run=False,
        same_losses=False,
    ),
    "shard_ddp": Entry(
        make=lambda model: Sharded(model, options=EngineOptions(stage=0)), label="shard_ddp"
    ),
    "zero1": Entry(
        make=lambda model: Sharded(model, options=EngineOptions(stage=1)), label="zero1"
    ),
    "zero2": Entry(
        make=lambda model: Sharded(model, options=EngineOptions(stage=2)), label="zero2"
    ),
    "zero3": Entry(
        make=lambda model: Sharded(model, options=EngineOptions(stage=3)), label="zero3"
    ),
    **{
        f"{name}_shm": Entry(
            make=partial(Sharded, options=EngineOptions(stage=stage), backend="shm"),
            label=f"{name} on shm",
            devices=("cpu",),
        )
        for stage, name in enumerate(("shard_ddp", "zero1", "zero2", "zero3"))
    },
    **{
        f"{name}_auto": Entry(
            make=partial(Sharded, options=EngineOptions(stage=stage, bucket_mb="auto")),
            label=f"{name}, bucket_mb='auto'",
            in_default_run=False,
        )
        for stage, name in enumerate(("shard_ddp", "zero1", "zero2", "zero3"))
    },
    **{
        f"{name}_mpi": Entry(
            make=partial(Sharded, options=EngineOptions(stage=stage), backend="mpi"),
            label=f"{name} over MPI",
            in_default_run=False,
            devices=("cpu",),
            needs_mpi=True,
        )
        for stage, name in enumerate(("shard_ddp", "zero1", "zero2", "zero3"))
    },
    **{
        f"deepspeed{stage}": Entry(
            make=partial(DeepSpeedZeRO, stage=stage), label=f"DeepSpeed, ZeRO stage {stage}"
        )
        for stage in (1, 2, 3)
        if is_installed()
    },
    "zero3_checkpointed": Entry(
        make=lambda model: CheckpointedSharded(model, options=EngineOptions(stage=3)),
        label="zero3, checkpointed",
    ),
    **{
        f"fit_{name}": Entry(
            make=partial(Fitted, strategy=strategy), label=label, in_default_run=False
        )
        for name, label, strategy in (
            ("ddp", "Lightning's ddp, a fit", LightningDDP),
            ("shard_ddp", "shard_ddp, a fit", partial(DDPStrategy, **_QUIET)),
            ("zero1", "zero1, a fit", partial(ZeRO1Strategy, **_QUIET)),
            ("zero2", "zero2, a fit", partial(ZeRO2Strategy, **_QUIET)),
            ("zero3", "zero3, a fit", partial(ZeRO3Strategy, **_QUIET)),
        )
    },
}
"""By name, in the order of the table."""
