"""Elastic training: ranks are lost and join, and training goes on. `strategy="elastic"`.

    step         step         step ✗ a peer is lost     step ...
        boundary     boundary      │                 ▲
           │ remember: a snapshot, │                 │
           ▼ a copy at the buddy   └─> reconfigure ──────┘

What happens at a boundary and in a reconfiguration: see `reconfiguration`; who takes part:
`changing_ranks`.
"""

import time
from typing import Any, Unpack

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.section import section_of, writable_section
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.loop import make_elastic
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.strategies.configs import ElasticConfig, GradientConfig, RunConfig
from lightning_shard.strategies.elastic_checks import check_backend, check_trainer
from lightning_shard.strategies.elastic_membership import Bounds
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.options import ElasticOptions, SharedOptions
from lightning_shard.strategies.reconfiguration import ReconfiguringStrategy


class ElasticStrategy(ReconfiguringStrategy):
    """Data parallel over ranks that come and go.

    Raises:
        ConfigError: Options that contradict each other.
    """

    assigns_samples = True

    @takes(RunConfig, GradientConfig, ElasticConfig)
    def __init__(self, **options: Unpack[ElasticOptions]) -> None:
        elastic = ElasticConfig.of(options)
        check_backend(RunConfig.of(options).backend)
        self.stage = elastic.stage
        super().__init__(**part(SharedOptions, options))
        self._bounds = Bounds(
            min_ranks=elastic.min_ranks,
            max_ranks=elastic.max_ranks,
            patience_seconds=elastic.patience,
            max_failures=elastic.max_failures,
        )
        self._snapshot_every = elastic.snapshot_every
        self._data_assignment = DataAssignment(
            elastic.global_batch_size, elastic.learning_rate_scaling
        )
        self._memory = SnapshotMemory()

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:  # before configure_optimizers, which may ask for the number of steps
            make_elastic(trainer)
            self._data_assignment.begin(trainer)
        super().setup(trainer)
        if not fitting:
            return
        check_trainer(trainer, self._averages)
        self._memory = SnapshotMemory()
        if self._restarts is not None:
            self._restarts.begin_fit()
            self._memory = SnapshotMemory(self._restarts.make_buffers(), self._restarts.held)
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
            self._data_assignment.assign(trainer, dataloader, rank, self.world_size)
        return super().process_dataloader(dataloader)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None
        weight = self._data_assignment.weight(self.lightning_module.trainer.fit_loop.batch_idx)
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            self._data_assignment.end(self._trainer)
        super().teardown()
        self._memory = SnapshotMemory()  # what it holds has to do with groups

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint:
            writable_section(checkpoint)["elastic"] = self._data_assignment.state(self._trainer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        kept = section_of(checkpoint).get("elastic")
        if kept is not None:
            self._data_assignment.load_state(kept, checkpoint["global_step"])
            _lightning.forget_data(self._trainer)  # which configure_optimizers may have asked for
