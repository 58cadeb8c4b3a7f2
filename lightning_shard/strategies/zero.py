"""Strategies of data parallelism alone, one for each ZeRO stage, and 0 that replicates all."""

from lightning_shard.strategies.data_parallel import DataParallelStrategy


class DDPStrategy(DataParallelStrategy):
    """Everything replicated; gradients are averaged. `strategy="shard_ddp"`."""

    stage = 0


class ZeRO1Strategy(DataParallelStrategy):
    """Optimizer state in shards. `strategy="zero1"`."""

    stage = 1


class ZeRO2Strategy(DataParallelStrategy):
    """Optimizer state and gradients in shards. `strategy="zero2"`."""

    stage = 2


class ZeRO3Strategy(DataParallelStrategy):
    """Parameters, gradients and optimizer state in shards. `strategy="zero3"`, "shard_fsdp"."""

    stage = 3
