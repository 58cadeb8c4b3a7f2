"""Local SGD and DiLoCo as a Lightning strategy: ranks train by themselves, and meet at times.

    validation, checkpoints     see the consensus, and training goes on from where each rank was
    the end of a fit            a last round: the module holds the consensus on every rank

The loss scaler of 16-mixed asks all ranks about overflow before each step, so that all take or skip
the same ones: one element per step. Nothing else is sent between two exchanges.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.checkpoint.by_rank import entries_of_ranks, own_entry
from lightning_shard.checkpoint.optimizer_state import local_state_dict
from lightning_shard.checkpoint.run_folders import names_of
from lightning_shard.checkpoint.section import section_of
from lightning_shard.core.options import takes
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.compression import Compressor, Tally, find_compressor
from lightning_shard.data_parallel.compression.state import mean_of_ranks, with_means
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.held_bytes import HeldBytes, storage_bytes
from lightning_shard.data_parallel.local_sgd.local_sgd import (
    LocalEngine,
    LocalSGD,
    check_compressor,
    check_model,
)
from lightning_shard.data_parallel.local_sgd.rules import (
    OuterOptimization,
    SyncRule,
    SyncSchedule,
    averaged_state,
    outer_factory,
    plain_average,
    state_by_name,
    with_state_by_name,
)
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.options import LocalSGDOptions, SharedOptions
from lightning_shard.strategies.parts import LocalUpdates
from lightning_shard.strategies.trainer.hook_advice import may_set_weights


class LocalSGDRounds(LocalUpdates):
    """Lets ranks train by themselves once the warm-up is over, and meet when it is time."""

    engine_type = LocalEngine

    def __init__(self, run: Any, options: LocalSGDOptions) -> None:
        super().__init__(run)
        self.schedule = SyncSchedule(**options.part(SyncSchedule))
        self.outer = outer_factory(options.outer_optimizer)
        self.compressor = find_compressor(options.compression)
        check_compressor(self.compressor)
        if self.compressor is not None and self.outer is None:
            self.outer = plain_average  # of changes, which can be compressed
        self.local: LocalSGD | None = None
        self._alone: DataGroups | None = None
        self._loaded: Mapping[str, Any] | None = None  # of a checkpoint, until training starts
        self._loaded_own: Mapping[str, Any] | None = None  # the same of this rank alone
        self._last_state: Mapping[str, Any] = {}  # of the last run, on rank 0
        self._last_own: Mapping[str, Any] = {}  # the same of this rank alone
        self._num_steps = 0
        self._steps_by_trainer = False
        self._guards: list[RemovableHandle] = []

    @override
    def make_groups(self) -> None:
        self._alone = DataGroups.of(self.run.groups.all_ranks.beside([self.strategy.mesh_rank]))

    @override
    def forget_groups(self) -> None:
        self._alone = None

    @override
    def begin_run(self, trainer: "pl.Trainer") -> None:
        self.refuse(
            trainer,
            "local SGD they train by themselves; expected it to be off. Statistics of batch norms "
            "are averaged when ranks meet.",
            "each rank's own weights, which differ under local SGD; expected no averaging "
            "callback. Use strategy='shard_ddp' with it, or an outer optimizer, which averages "
            "over time as well.",
        )

    @override
    def begin_fit(self, trainer: "pl.Trainer") -> None:
        super().begin_fit(trainer)  # now, not when the warm-up ends
        check_model(self.strategy.engine, self.schedule, self.compressor)

    # --- rounds -----------------------------------------------------------------------------------

    @override
    def begin_training(self) -> None:
        self._last_state, self._last_own = {}, {}
        self._num_steps = self.run.module.trainer.global_step
        self._guards = [
            optimizer.register_step_post_hook(self._check_step)
            for optimizer in self.strategy.optimizers
        ]
        self._part_if_time()
        self._loaded = self._loaded_own = None

    def begin_batch(self) -> None:
        """See what user code has done since the last step, and part if it is time."""
        if self.local is not None:
            self.local.watch(has_stepped=False)
        self._part_if_time()  # after a step by hand, in which `toggle_optimizer` may freeze others'

    def _part_if_time(self) -> None:
        """Once the warm-up is over, leave the ranks to themselves."""
        if self.local is not None or self.schedule.is_warming_up(self._num_steps):
            return
        assert self._alone is not None
        module, engine = self.run.module, self.strategy.engine
        keeps_more = self.outer is not None or self.schedule.overlap_steps > 0
        watches = keeps_more and may_set_weights(module, module.trainer.callbacks)
        engine.reduce_over(self._alone, alone=True)
        self.local = LocalSGD(
            engine,
            self.schedule,
            self._rule,
            self.run.groups.reducing.dp,
            self._num_steps,
            self.compressor,
            watches=any(self.strategy.collectives.all_gather_object(watches)),
        )
        if self._loaded is not None:
            self.local.load_state_dict(self._loaded, self._loaded_own)

    def _rule(self, trained: Mapping[str, Tensor]) -> SyncRule:
        return SyncRule() if self.outer is None else OuterOptimization(trained, self.outer)

    def update(self, step: Callable[[], Any]) -> Any:
        """Run an optimizer's step of the Trainer's, and count it if its loops do not."""
        with setting(self, _steps_by_trainer=True):
            result = step()
        if self.local is not None:
            self.local.watch(has_stepped=True)
        if not self.run.module.automatic_optimization:
            self._note_step()
        return result

    def _note_step(self) -> None:
        self._num_steps += 1
        if self.local is not None:
            with self.run.steps.bytes.counting():
                self.local.after_step()

    @override
    def end_step(self) -> None:
        self._note_step()
        self._part_if_time()

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._steps_by_trainer:
            raise ConfigError(
                f"Rank {self.strategy.mesh_rank}: a step of {type(optimizer).__name__} went past "
                f"the Trainer, expected steps that local SGD can count. Take the optimizer from "
                f"self.optimizers() without use_pl_optimizer=False."
            )

    @override
    def in_agreement(self) -> AbstractContextManager[None]:
        return nullcontext() if self.local is None else self.local.consensus()

    @override
    def tally_of_codecs(self) -> Tally:
        return Tally() if self.local is None else self.local.compression_tally()

    @override
    def end_steps(self) -> None:
        while self._guards:
            self._guards.pop().remove()
        if self.local is None:
            return
        self.local.finish()
        self._last_state = self.local.state_dict()
        self._last_own = {"local_sgd": self.local.own_state()}
        strategy = self.strategy
        for optimizer in strategy.optimizers:
            state = strategy.optimizer_state(optimizer)
            if state:
                self._load_state(optimizer, state)
        self.local = None
        strategy.engine.reduce_over(self.run.groups.reducing, alone=False)

    @override
    def end_run(self) -> None:
        self.local = self._loaded = self._loaded_own = None
        self._guards = []
        super().end_run()

    # --- checkpoints ------------------------------------------------------------------------------

    @contextmanager
    def mean_of_ranks(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, an optimizer has the mean of what the ranks have; each must enter."""
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        alone, ranks = self.local is not None, self.run.groups.everybody
        with averaged_state(raw, ranks) if alone else nullcontext():
            yield

    @override
    def section(self) -> Mapping[str, Any]:
        state = self._last_state if self.local is None else self.local.state_dict()
        return {"local_sgd": state} if state else {}

    @override
    def kept_besides(self) -> Mapping[str, Any]:
        if self.local is None:
            return self._last_own
        names = names_of(self.run.checkpointed)
        optimizers = [state_by_name(one, names) for one in self.strategy.optimizers]
        return {"local_sgd": self.local.own_state(), "optimizers": optimizers}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what this rank has kept by itself, once optimizers have their states."""
        strategy, section = self.strategy, section_of(checkpoint)
        own = own_entry(section, strategy.mesh, strategy.mesh_rank)
        self._loaded_own = own.get("local_sgd")
        self._loaded = _with_means(section) if self._loaded_own is None else section["local_sgd"]
        states, names = checkpoint["optimizer_states"], names_of(self.run.checkpointed)
        for optimizer, state, mine in zip(
            strategy.optimizers, states, own.get("optimizers", ()), strict=False
        ):
            self._load_state(optimizer, with_state_by_name(state, mine, optimizer, names))

    def _load_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        engine = self.strategy.engine
        with engine.optimizer_view():
            optimizer.load_state_dict(local_state_dict(state, optimizer, engine))


class LocalSGDStrategy(DataParallelStrategy):
    """Parameters are averaged every `sync_every` steps. `strategy="local_sgd"`.

    Steps are those of optimizers, as `trainer.global_step` counts them.

    Raises:
        ConfigError: Options that cannot be, by themselves or together.
    """

    stage = 0
    keeps_optimizers = True
    lays_out_anew = False
    meets_at_steps = False
    saves_shards = False  # ranks agree for a moment only, in which their state is copied

    @takes(LocalSGDOptions)
    def __init__(self, options: LocalSGDOptions) -> None:
        super().__init__(**options.part(SharedOptions))
        self.run.hooks = self.rounds = LocalSGDRounds(self.run, options)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.rounds.begin_batch()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.rounds.update(partial(super().optimizer_step, *args, **kwargs))

    @property
    @override
    def compression(self) -> Compressor | None:
        return self.rounds.compressor

    @property
    @override
    def held_besides(self) -> list[str]:
        held = []
        if self.rounds.outer is not None:
            held.append("what the outer optimizer keeps")
        if self.rounds.schedule.overlap_steps:
            held.append("what is on its way")
        return held

    @override
    def held_bytes(self) -> HeldBytes:
        held, local = super().held_bytes(), self.rounds.local
        outer = [] if local is None else local.held()
        return replace(held, optimizer_state=held.optimizer_state + storage_bytes(outer))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.rounds.mean_of_ranks(optimizer):
            return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.rounds.load(checkpoint)


def _with_means(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what local SGD keeps for all ranks, with means of what each has kept."""
    shared = section.get("local_sgd")
    kept = [one["local_sgd"] for _, one in entries_of_ranks(section) if "local_sgd" in one]
    if shared is None or not kept:
        return shared
    own = shared["own"] or mean_of_ranks([one["parameters"] for one in kept])
    compression = with_means(shared["compression"], [one["compression"] for one in kept])
    return {**shared, "own": own, "compression": compression}
