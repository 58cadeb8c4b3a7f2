"""One strategy of each scheme, on ranks of this process, and a model that each trains alike."""

from collections.abc import Callable
from typing import Any

from lightning_shard import (
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.stacks import BATCH, Stack
from tests.trainers import rank_loader

PLAN = {"blocks.*.layer": "colwise_gather_output"}
SCHEMES: dict[str, tuple[int, Callable[[], Any]]] = {
    "shard_ddp": (2, lambda: DDPStrategy(backend="in_process")),
    "zero1": (2, lambda: ZeRO1Strategy(backend="in_process")),
    "zero2": (2, lambda: ZeRO2Strategy(backend="in_process")),
    "zero3": (2, lambda: ZeRO3Strategy(backend="in_process")),
    "tensor": (2, lambda: TensorParallelStrategy(backend="in_process", plan=PLAN)),
    "pipeline": (2, lambda: PipelineParallelStrategy(backend="in_process", num_microbatches=2)),
    "tensor_zero2": (
        4,
        lambda: HybridParallelStrategy(
            backend="in_process", tensor_parallel_size=2, zero_stage=2, plan=PLAN
        ),
    ),
    "hybrid": (
        4,
        lambda: HybridParallelStrategy(
            backend="in_process", pipeline_parallel_size=2, zero_stage=1, num_microbatches=2
        ),
    ),
}


class OfRanks(Stack):
    """Takes each rank's part of the same global batches."""

    def train_dataloader(self) -> Any:
        return rank_loader(self.trainer, self.dataset(), BATCH)
