"""The strategies of the table: what a feature is given to build its Trainer and its data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)

GLOBAL_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Column:
    """A strategy and its ranks.

    Attributes:
        make: Makes the strategy, anew for each run; None for a single device.
        num_batches: Into how many the ranks divide a global batch.
    """

    name: str
    make: Callable[..., Strategy] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    num_ranks: int = 2
    num_batches: int = 2

    @property
    def batch_size(self) -> int:
        """Samples of a rank's batch."""
        return GLOBAL_BATCH // self.num_batches

    def strategy(self) -> Any:
        """Return a new strategy, or Lightning's choice for one device."""
        if self.make is None:
            return "auto"
        return self.make(backend="in_process", **dict(self.options))


def _column(name: str, make: Callable[..., Strategy], **options: Any) -> Column:
    return Column(name=name, make=make, options=tuple(options.items()))


ONE_DEVICE = Column(name="one device", num_ranks=1, num_batches=1)
COLUMNS = {
    column.name: column
    for column in (
        _column("shard_ddp", DDPStrategy),
        _column("zero1", ZeRO1Strategy),
        _column("zero2", ZeRO2Strategy),
        _column("zero3", ZeRO3Strategy),
        Column(name="tensor_parallel", make=TensorParallelStrategy, num_batches=1),
        Column(
            name="pipeline_parallel",
            make=PipelineParallelStrategy,
            options=(("num_microbatches", 2),),
            num_batches=1,
        ),
        Column(
            name="hybrid_parallel",
            make=HybridParallelStrategy,
            options=(("pipeline_parallel_size", 2), ("num_microbatches", 2)),
            num_ranks=4,
        ),
        _column("local_sgd", LocalSGDStrategy, sync_every=1),
        _column("async_sgd", AsyncSGDStrategy, staleness_bound=0),
        _column("elastic", ElasticStrategy),
    )
}
QUICK = ("zero3",)  # the others are slow tests
PIPELINES = ("pipeline_parallel", "hybrid_parallel")
OF_OTHER_SAMPLES = tuple(
    name for name in COLUMNS if name not in (*PIPELINES, "tensor_parallel")
)  # whose ranks are all given other samples


@dataclass(frozen=True)
class Here:
    """Where a feature is tried: a column, and a folder of its own."""

    column: Column
    folder: Path

    def trainer(self, **options: Any) -> L.Trainer:
        """Return a quiet Trainer of two epochs whose ranks are this column's."""
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.column.num_ranks,
            "strategy": self.column.strategy(),
            "max_epochs": 2,
            "default_root_dir": self.folder,
            "logger": False,
            "enable_checkpointing": any(
                isinstance(one, Checkpoint) for one in options.get("callbacks", [])
            ),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        if "barebones" in options:
            defaults = {key: defaults[key] for key in ("accelerator", "devices", "strategy")}
        return L.Trainer(**(defaults | options))
