"""Elastic training: ranks are lost and join, and training goes on. `strategy="elastic"`.

    step         step         step ✗ a peer is lost     step ...
        boundary     boundary      │                 ▲
           │ remember: a snapshot, │                 │
           ▼ a copy at the buddy   └─> regroup ──────┘

What happens at a boundary and in a regrouping: see `regrouping`; who takes part: `changing_ranks`.
"""

import time
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.feeding import Feeding
from lightning_shard.elastic.loop import make_elastic
from lightning_shard.elastic.memory import Memory
from lightning_shard.option_checks import checked_options
from lightning_shard.strategies.changing_ranks import Bounds
from lightning_shard.strategies.checkpoints import CHECKPOINT_KEY
from lightning_shard.strategies.elastic_checks import check_options, check_trainer, stage_of
from lightning_shard.strategies.regrouping import RegroupingStrategy


class ElasticStrategy(RegroupingStrategy):
    """Data parallel over ranks that come and go.

    Args:
        accelerator: See `ShardStrategy`, as for all up to `announce`.
        parallel_devices: One device per local rank.
        cluster_environment: Lightning's.
        checkpoint_io: Lightning's.
        precision_plugin: Lightning's.
        backend: "auto" or a backend's name; MPI ends all ranks with one and is refused.
        num_ranks: With backend "in_process": ranks to begin with.
        timeout: Seconds after which a silent peer is taken for lost.
        debug: Compare every collective call between the ranks before it is made.
        announce: Say in one line, when a fit starts, what runs and what each rank will hold.
        units: See `DataParallelStrategy`, as for the next two.
        bucket_mb: Size of what is communicated together.
        reduce_dtype: Format in which gradients travel.
        scheme: "shard_ddp", "zero1", "zero2" or "zero3".
        min_ranks: With fewer, training waits for `patience` seconds, then saves and ends.
        max_ranks: Further newcomers wait until there is room; None admits all.
        snapshot_every: Optimizer steps between the boundaries that ranks remember: at most so many
            are done again after a loss. "shard_ddp" loses none but between an update and the end of
            its step.
        global_batch_size: Samples of an optimizer step, whatever the number of ranks; None keeps
            what the first ranks have together.
        learning_rate_scaling: "linear" or "sqrt": let the batch of each rank stay as it is, and
            scale the learning rate by the number of ranks; None holds the global batch instead.
        max_failures: A rank that raises errors of its own more often is put out with the last.
        patience: Seconds to wait below `min_ranks`.

    Raises:
        ConfigError: Options that contradict each other.
    """

    deals_samples = True

    @checked_options
    def __init__(
        self,
        accelerator: "pl.accelerators.Accelerator | None" = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        backend: str = "auto",
        num_ranks: int | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        debug: bool = False,
        announce: bool = True,
        units: list[str] | None = None,
        bucket_mb: float | None = None,
        reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        scheme: Literal["shard_ddp", "zero1", "zero2", "zero3"] = "zero2",
        min_ranks: int = 1,
        max_ranks: int | None = None,
        snapshot_every: int = 10,
        global_batch_size: int | None = None,
        learning_rate_scaling: Literal["linear", "sqrt"] | None = None,
        max_failures: int = 3,
        patience: float = 60.0,
    ) -> None:
        self.stage = stage_of(scheme)  # type: ignore[misc]
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            backend=backend,
            num_ranks=num_ranks,
            timeout=timeout,
            debug=debug,
            announce=announce,
            units=units,
            bucket_mb=bucket_mb,
            reduce_dtype=reduce_dtype,
        )
        self._bounds = Bounds(
            min_ranks=min_ranks,
            max_ranks=max_ranks,
            patience_seconds=patience,
            max_failures=max_failures,
        )
        check_options(backend, snapshot_every, min_ranks, max_ranks, max_failures, patience)
        self._snapshot_every = snapshot_every
        self._feeding = Feeding(global_batch_size, learning_rate_scaling)
        self._memory = Memory()

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:  # before configure_optimizers, which may ask for the number of steps
            make_elastic(trainer)
            self._feeding.begin(trainer)
        super().setup(trainer)
        if not fitting:
            return
        check_trainer(trainer, self._averages)
        self._memory = Memory()
        if self._restarts is not None:
            self._restarts.begin_fit()
            self._memory = Memory(self._restarts.make_buffers(), self._restarts.held)
        self.stands_behind_step = self._is_over = self._ends_in_common = False
        self._has_begun, self._began = self.is_newcomer, time.time()
        self._num_in_vain, self._last_loss = 0, ((), -1)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._forget_live)
        if self.is_newcomer:
            trainer.num_sanity_val_steps = 0
        else:
            self._enter_memory()
            _lightning.share_places(trainer, self.broadcast)

    @property
    @override
    def held_besides(self) -> list[str]:
        return ["snapshots in host memory"]

    def _forget_live(self, *_: Any) -> None:
        self._memory.forget_live()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.training:
            rank = self.data_collectives.rank
            self._feeding.deal(trainer, dataloader, rank, self.world_size)
        return super().process_dataloader(dataloader)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None
        weight = self._feeding.weight(self.lightning_module.trainer.fit_loop.batch_idx)
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            self._feeding.end(self._trainer)
        super().teardown()
        self._memory = Memory()  # what it holds has to do with groups

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint:
            checkpoint.setdefault(CHECKPOINT_KEY, {})["elastic"] = self._feeding.state(
                self._trainer
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        kept = checkpoint.get(CHECKPOINT_KEY, {}).get("elastic")
        if kept is not None:
            self._feeding.load_state(kept, checkpoint["global_step"])
            _lightning.forget_data(self._trainer)  # which configure_optimizers may have asked for
