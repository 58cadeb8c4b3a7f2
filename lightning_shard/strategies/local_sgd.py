"""Local SGD and DiLoCo as a Lightning strategy: ranks train by themselves, and meet at times.

    validation, checkpoints     see the consensus, and training goes on from where each rank was
    the end of a fit            a last round: the module holds the consensus on every rank

The loss scaler of 16-mixed asks all ranks about overflow before each step, so that all take or skip
the same ones: one element per step. Nothing else is sent between two exchanges.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.checkpoint.by_rank import entries_of_ranks, own_entry
from lightning_shard.checkpoint.optimizer_state import local_state_dict
from lightning_shard.checkpoint.run_folders import names_of
from lightning_shard.checkpoint.section import section_of, writable_section
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.compression import Compressor, Tally, find_compressor
from lightning_shard.data_parallel.compression.state import mean_of_ranks, with_means
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes, storage_bytes
from lightning_shard.data_parallel.local_sgd.local_sgd import (
    LocalEngine,
    LocalSGD,
    check_compressor,
    check_model,
)
from lightning_shard.data_parallel.local_sgd.optimizer_state import (
    averaged_state,
    state_by_name,
    with_state_by_name,
)
from lightning_shard.data_parallel.local_sgd.rules import (
    OuterOptimization,
    SyncRule,
    outer_factory,
    plain_average,
)
from lightning_shard.data_parallel.local_sgd.schedule import SyncSchedule
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.local_updates import LocalUpdates
from lightning_shard.strategies.options import LocalSGDOptions, SharedOptions
from lightning_shard.strategies.trainer._lightning import layer_sync
from lightning_shard.strategies.trainer.hook_advice import may_set_weights


class LocalSGDStrategy(LocalUpdates):
    """Parameters are averaged every `sync_every` steps. `strategy="local_sgd"`.

    Steps are those of optimizers, as `trainer.global_step` counts them.

    Raises:
        ConfigError: Options that cannot be, by themselves or together.
    """

    stage = 0
    saves_shards = False  # ranks agree for a moment only, in which their state is copied
    engine_type: ClassVar[type[DataParallelEngine]] = LocalEngine

    @takes(LocalSGDOptions)
    def __init__(self, options: LocalSGDOptions) -> None:
        super().__init__(**options.part(SharedOptions))
        self._schedule = SyncSchedule(**options.part(SyncSchedule))
        self._outer = outer_factory(options.outer_optimizer)
        self._compressor = find_compressor(options.compression)
        check_compressor(self._compressor)
        if self._compressor is not None and self._outer is None:
            self._outer = plain_average  # of changes, which can be compressed
        self._alone: DataGroups | None = None
        self._local: LocalSGD | None = None  # while ranks train by themselves
        self._loaded: Mapping[str, Any] | None = None  # of a checkpoint, until training starts
        self._loaded_own: Mapping[str, Any] | None = None  # the same of this rank alone
        self._last_state: Mapping[str, Any] = {}  # of the last run, on rank 0
        self._last_own: Mapping[str, Any] = {}  # the same of this rank alone
        self._num_steps = 0
        self._steps_by_trainer = False
        self._guards: list[RemovableHandle] = []

    @property
    def local_engine(self) -> LocalEngine:
        """The engine, with its switch."""
        assert isinstance(self.engine, LocalEngine)
        return self.engine

    @override
    def _make_groups(self) -> None:
        super()._make_groups()
        own = dist.new_group([self.mesh_rank], use_local_synchronization=True)
        self._alone = DataGroups.of(self.backend.collectives(own))

    @override
    def forget_groups(self) -> None:
        self._alone = None
        super().forget_groups()

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_run(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:  # now, not when the warm-up ends
            check_model(self.local_engine, self._schedule, self._compressor)

    def _check_run(self, trainer: "pl.Trainer") -> None:
        if layer_sync(self) is not None:
            raise ConfigError(
                "sync_batchnorm=True makes ranks wait for each other in every forward, but under "
                "local SGD they train by themselves; expected it to be off. Statistics of batch "
                "norms are averaged when ranks meet."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                raise ConfigError(
                    f"{type(callback).__name__} would average each rank's own weights, which "
                    f"differ under local SGD; expected no averaging callback. Use "
                    f"strategy='shard_ddp' with it, or an outer optimizer, which averages over "
                    f"time as well."
                )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._last_state, self._last_own = {}, {}
        self._num_steps = self.run_module.trainer.global_step
        self._guards = [
            optimizer.register_step_post_hook(self._check_step) for optimizer in self.optimizers
        ]
        self._part_if_time()
        self._loaded = self._loaded_own = None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._local is not None:
            self._local.watch(has_stepped=False)
        self._part_if_time()  # after a step by hand, in which `toggle_optimizer` may freeze others'

    def _part_if_time(self) -> None:
        """Once the warm-up is over, leave the ranks to themselves."""
        if self._local is not None or self._schedule.is_warming_up(self._num_steps):
            return
        assert self._alone is not None
        assert self._reducing is not None
        callbacks = self.run_module.trainer.callbacks  # type: ignore[attr-defined]
        keeps_more = self._outer is not None or self._schedule.overlap_steps > 0
        watches = keeps_more and may_set_weights(self.run_module, callbacks)
        self.local_engine.reduce_over(self._alone, alone=True)
        self._local = LocalSGD(
            self.local_engine,
            self._schedule,
            self._rule,
            self._reducing.dp,
            self._num_steps,
            self._compressor,
            watches=any(self.collectives.all_gather_object(watches)),
        )
        if self._loaded is not None:
            self._local.load_state_dict(self._loaded, self._loaded_own)

    def _rule(self, trained: Mapping[str, Tensor]) -> SyncRule:
        return SyncRule() if self._outer is None else OuterOptimization(trained, self._outer)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._steps_by_trainer = True
        try:
            result = super().optimizer_step(*args, **kwargs)
        finally:
            self._steps_by_trainer = False
        if self._local is not None:
            self._local.watch(has_stepped=True)
        if not self.run_module.automatic_optimization:
            self._note_step()
        return result

    def _note_step(self) -> None:
        self._num_steps += 1
        if self._local is not None:
            with self._step_bytes.counting():
                self._local.after_step()

    @override
    def _end_step(self) -> None:
        self._note_step()
        self._part_if_time()

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps_by_trainer:
            raise ConfigError(
                f"Rank {self.mesh_rank}: a step of {type(optimizer).__name__} went past the "
                f"Trainer, expected steps that local SGD can count. Take the optimizer from "
                f"self.optimizers() without use_pl_optimizer=False."
            )

    @override
    def _consensus(self) -> AbstractContextManager[None]:
        return nullcontext() if self._local is None else self._local.consensus()

    @property
    @override
    def compression(self) -> Compressor | None:
        return self._compressor

    @override
    def _tally_of_codecs(self) -> Tally:
        return Tally() if self._local is None else self._local.compression_tally()

    @property
    @override
    def held_besides(self) -> list[str]:
        held = []
        if self._outer is not None:
            held.append("what the outer optimizer keeps")
        if self._schedule.overlap_steps:
            held.append("what is on its way")
        return held

    @override
    def held_bytes(self) -> HeldBytes:
        held = super().held_bytes()
        outer = [] if self._local is None else self._local.held()
        return replace(held, optimizer_state=held.optimizer_state + storage_bytes(outer))

    @override
    def _end_training(self) -> None:
        while self._guards:
            self._guards.pop().remove()
        if self._local is None:
            return
        self._local.finish()
        self._last_state = self._local.state_dict()
        self._last_own = {"local_sgd": self._local.own_state()}
        for optimizer in self.optimizers:
            state = self.optimizer_state(optimizer)
            if state:
                with self.engine.optimizer_view():
                    optimizer.load_state_dict(local_state_dict(state, optimizer, self.engine))
        self._local = None
        assert self._reducing is not None
        self.local_engine.reduce_over(self._reducing, alone=False)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._consensus():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._mean_of_ranks(optimizer):
            return super().optimizer_state(optimizer)

    @contextmanager
    def _mean_of_ranks(self, optimizer: Optimizer) -> Iterator[None]:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        alone = self._local is not None
        with averaged_state(raw, self.collectives) if alone else nullcontext():
            yield

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        state = self._last_state
        if self._local is not None:
            state = self._local.state_dict()
        if state and "optimizer_states" in checkpoint:
            writable_section(checkpoint)["local_sgd"] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def kept_besides(self) -> Mapping[str, Any]:
        if self._local is None:
            return self._last_own
        optimizers = [state_by_name(one, names_of(self)) for one in self.optimizers]
        return {"local_sgd": self._local.own_state(), "optimizers": optimizers}

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        section = section_of(checkpoint)
        own = own_entry(section, self.mesh, self.mesh_rank)
        self._loaded_own = own.get("local_sgd")
        self._loaded = _with_means(section) if self._loaded_own is None else section["local_sgd"]
        states = checkpoint["optimizer_states"]
        for optimizer, state, mine in zip(
            self.optimizers, states, own.get("optimizers", ()), strict=False
        ):
            mixed = with_state_by_name(state, mine, optimizer, names_of(self))
            with self.engine.optimizer_view():
                optimizer.load_state_dict(local_state_dict(mixed, optimizer, self.engine))

    @override
    def teardown(self) -> None:
        self._local = self._loaded = self._loaded_own = None
        self._guards = []
        super().teardown()


def _with_means(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what local SGD keeps for all ranks, with means of what each has kept."""
    shared = section.get("local_sgd")
    kept = [one["local_sgd"] for _, one in entries_of_ranks(section) if "local_sgd" in one]
    if shared is None or not kept:
        return shared
    own = shared["own"] or mean_of_ranks([one["parameters"] for one in kept])
    compression = with_means(shared["compression"], [one["compression"] for one in kept])
    return {**shared, "own": own, "compression": compression}
