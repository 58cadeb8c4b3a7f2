"""What a fit leaves on its ranks: full parameters, or the shards that they had.

    full     each rank gathers the parameters, rank 0 the optimizers' states (on the host)
    rank 0   of ranks of one process, whose others end with the fit: it gathers, they have NaNs
    shards   nothing is gathered. Engine and groups stay as they are, at rest: `save_checkpoint`
             works as in the fit. See `data_parallel.shards_at_rest` for what the module says
    states   up to stage 2, where parameters are full anyway: the module is as after any fit, and
             the optimizers' states stay in shards. What says how they are cut is `_cut_states`
    a run    makes the module full first, as at the beginning of any run; after an evaluation its
             ranks have shards again, and the optimizers' states have been there all the time

What "auto" decides is the same on all ranks. After a failure each rank has what it has.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Literal
from unittest.mock import patch
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shard.backends.free_memory import free_bytes, free_host_bytes
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import replicated
from lightning_shard.data_parallel.shards_at_rest import ShardsAtRest, wake
from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.errors import ConfigError
from lightning_shard.layout.flat import FlatLayout
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.parallel_dimensions.dimension import ParallelDimension
from lightning_shard.sizes import format_bytes
from lightning_shard.strategies.checkpoints import CheckpointingStrategy
from lightning_shard.strategies.options import AfterFit
from lightning_shard.trainer.kept_shards import complete_kept
from lightning_shard.trainer.weight_averaging import AverageOfShards

StatesAtRest = Literal["keep", "gather", "drop"]
_USED_AT_MOST = 0.9  # of the memory that is free


class EndingStrategy(CheckpointingStrategy):
    """Ends a run with full parameters or with shards."""

    may_leave_shards: ClassVar[bool] = True
    dimensions: Sequence[ParallelDimension]
    _after_fit: AfterFit = True
    _failed: bool
    _sharded: list[ShardedOptimizer]
    _replaced: Collection[ShardedOptimizer]
    _averages: list[AverageOfShards]
    _in_split_model: ExitStack
    _at_rest: ShardsAtRest | None = None
    _around_rest: ExitStack | None = None
    _states_in_shards: list[FlatLayout] | None = None  # the optimizers', of a fit that is over

    def _decide_end(self, after_fit: AfterFit) -> None:
        if after_fit is False and self.is_in_process:
            raise ConfigError(
                "full_parameters_after_fit=False leaves each rank its shards after the fit, but "
                "the ranks of the backend 'in_process' end with it; expected True or 'auto'. "
                "Leave it out, or use ranks that are processes: backend='gloo', devices=2."
            )
        self._after_fit = after_fit if self.may_leave_shards else True

    @property
    def _has_full_parameters(self) -> bool:
        """Whether each rank has full parameters between the steps."""
        return self._options.stage < 3

    def _check_end(self) -> None:
        """Refuse what a fit could not leave in shards, at its beginning.

        Raises:
            ConfigError: A callback averages weights, and shards are to stay.
        """
        if self._averages and self._after_fit is False and not self._has_full_parameters:
            raise ConfigError(
                "full_parameters_after_fit=False leaves the parameters in shards, but a callback "
                "averages weights and has the full average after the fit; expected one of the two. "
                "Leave out full_parameters_after_fit, or the callback."
            )

    # --- the end of a run -------------------------------------------------------------------------

    def _end_run(self) -> None:
        """Leave the module as the option says; each rank must call unless the run has failed."""
        engine = self._engine
        if self._at_rest is not None:  # no run has begun since
            return
        if engine is not None and self._leaves_shards(engine):
            self._leave_shards(engine)
            return
        if engine is not None and self._leaves_states(engine):
            self._leave_states(engine)
            return
        if engine is not None:
            if self._states_in_shards is not None and not self._failed:
                self._gather_states(engine)
            self._detach(engine, keep=self._keeps_full(engine))
            self._left_sharded = self._failed and self._holds_shards
        elif self._states_in_shards is not None:  # its set-up has failed
            self._left_sharded = True
        self._engine, self._states_in_shards = None, None
        self._revert_layer_sync()

    def _leaves_shards(self, engine: DataParallelEngine) -> bool:
        """Whether shards stay after this run, the same on all ranks; each rank must call."""
        if self._has_full_parameters or self._averages:
            return False
        return self._leaves(engine, "the parameters in shards")

    def _leaves_states(self, engine: DataParallelEngine) -> bool:
        """Whether optimizers' states stay in shards after this run, and parameters are full."""
        if not (self._has_full_parameters and self._holds_shards):
            return False
        return self._leaves(engine, "the optimizers' states in shards")

    def _leaves(self, engine: DataParallelEngine, otherwise: str) -> bool:
        if self._failed or self.is_in_process:
            return False
        if not self._is_fitting():
            return self._states_in_shards is not None
        return not (self._fits(engine, otherwise) if self._after_fit == "auto" else self._after_fit)

    def _keeps_full(self, engine: DataParallelEngine) -> bool:
        """Whether this rank's module is full after this run; each rank must call.

        Ranks of one process other than 0 end with it, on copies that nobody has afterwards.
        """
        chooses = self._after_fit == "auto" and self.is_in_process and self._is_fitting()
        holds_full = self._has_full_parameters or self.dimensions or self._averages
        if self._failed or not chooses or holds_full:
            return True
        return self._fits(engine, "full parameters to rank 0 alone") or self.mesh_rank == 0

    def _fits(self, engine: DataParallelEngine, otherwise: str) -> bool:
        """Whether the full state would fit into the memory of every rank; each rank must call."""
        fits, why = True, ""
        for where, needed, free in self._needs(engine):
            if free is not None and needed > _USED_AT_MOST * free:
                fits, why = False, f"{format_bytes(needed)} of the {format_bytes(free)} {where}"
        if self.reduce_boolean_decision(fits):
            return True
        rank_zero_warn(
            f"The fit leaves {otherwise}: full ones would take "
            f"{why or 'more than there is on another rank'}. trainer.save_checkpoint, fit, "
            f"validate, test and predict go on from there; full_parameters_after_fit="
            f"{'True' if self.is_in_process else 'True or False'} says so beforehand."
        )
        return False

    def _needs(self, engine: DataParallelEngine) -> Iterator[tuple[str, int, int | None]]:
        """Yield for each memory what the full state takes there of all ranks, and what is free."""
        each = sum(
            torch.Size(engine.full_shape(param)).numel() * param.element_size()
            for param in (() if self._has_full_parameters else engine.model.parameters())
        )
        state = replicated(engine, self.optimizers).optimizer_state
        on_host = self.num_processes * each + (state if self.node_rank == 0 else 0)
        yield "free on the host", on_host, free_host_bytes()
        if self.root_device.type != "cpu":
            devices = len(set(self.parallel_devices or [self.root_device]))
            sharing = -(-self.num_processes // devices)
            yield "free on the device", sharing * each, free_bytes(self.root_device)

    def _detach(
        self, engine: DataParallelEngine, *, keep: bool = True, states_stay: bool = False
    ) -> None:
        """Make the module full on every rank that keeps it, the optimizers' state on rank 0."""
        states = []
        if self._is_fitting():
            self._kept.keep(self, failed=self._failed)
        if not self._failed and self._holds_shards and not states_stay:
            states = [full_state_dict(sharded.optimizer, engine) for sharded in self._sharded]
        for average in self._averages:
            average.restore(full=not self._failed)
        if not self._failed:
            self._complete_kept(engine)
        engine.detach(restore=not self._failed, keep=keep)
        self._restore_dimensions(full=not self._failed)
        self._detach_optimizers()
        for sharded, state in zip(self._sharded, states, strict=False):
            sharded.optimizer.state.clear()
            if state:
                sharded.optimizer.load_state_dict(state)

    def _complete_kept(self, engine: DataParallelEngine) -> None:
        """Put full tensors where user code keeps some in shards; each rank must call."""
        if self._holds_shards or self.dimensions:
            of_params = {
                storage_key(one)
                for flat in engine.flats
                for one in (flat.full, flat.shard, flat.master)
            }
            complete_kept(self.run_module.trainer, self.collectives, of_params)

    def _detach_optimizers(self) -> None:
        for sharded in self._sharded:
            sharded.detach()
        for sharded in self._replaced:  # an exchanged optimizer begins anew after the fit
            sharded.detach()
            sharded.optimizer.state.clear()

    def _restore_dimensions(self, *, full: bool) -> None:
        """Undo what has split the model; with `full` each rank must call."""
        self._in_split_model.close()
        for one in reversed(self.dimensions):
            one.restore(full=full)

    # --- at rest ----------------------------------------------------------------------------------

    def _leave_states(self, engine: DataParallelEngine) -> None:
        """Leave the module full, and the optimizers' states in shards; each rank must call."""
        self._detach(engine, states_stay=True)
        engine.adoption.end()
        for gradients in engine.gradients:
            gradients.buffer.drop()
        self._states_in_shards = [flat.layout for flat in engine.flats]
        self._engine, self._cut_states = None, engine
        self._revert_layer_sync()

    def _leave_shards(self, engine: DataParallelEngine) -> None:
        """Gather nothing, and let engine and groups rest; each rank must call."""
        if self._is_fitting():
            self._kept.keep(self, failed=False)
        engine.rest()
        self._detach_optimizers()
        for param in engine.model.parameters():
            param.grad = None
        self._states_in_shards = [flat.layout for flat in engine.flats]
        strategy = ref(self)  # who gives the strategy up frees what it holds

        def wake_if_alive() -> bool:
            alive = strategy()
            if alive is not None:
                alive._wake("gather")
            return alive is not None

        self._at_rest = ShardsAtRest(self.run_module, self.mesh_rank, wake_if_alive)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is None or (self._at_rest is None and self._cut_states is None):
            super().teardown()
            return
        stays = self._at_rest is not None
        with patch.object(module, "cpu", lambda: module) if stays else nullcontext():
            super().teardown()  # Lightning moves full parameters there
        if self._around_rest is None:
            self._around_rest = ExitStack()
            self._around_rest.enter_context(self._saving_at_rest(module.trainer))
            if stays:
                self._around_rest.enter_context(self.engine.user_code.running())

    @contextmanager
    def _saving_at_rest(self, trainer: "pl.Trainer") -> Iterator[None]:
        """Let the trainer save inside, from shards; each rank must call."""
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with ExitStack() as opened:
                if self._at_rest is not None:
                    opened.enter_context(self._at_rest.opened())
                    opened.enter_context(self.engine.user_code.running(False))
                opened.enter_context(self._streaming(trainer))
                save(*args, **kwargs)

        with patch.object(trainer, "save_checkpoint", save_checkpoint):
            yield

    @override
    def _is_fitting(self) -> bool:
        return super()._is_fitting() and self._at_rest is None  # the trainer names its last run

    @override
    def _begin_run(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert module is not None
        if self._engine is not None and self._at_rest is not None:
            self._wake(self._next_states(same_model=self._engine.model is self.model))
        elif self._cut_states is not None:
            self._settle_states(self._next_states(same_model=self._cut_states.model is self.model))
        wake(module)  # another strategy's
        super()._begin_run(trainer)

    def _next_states(self, *, same_model: bool) -> StatesAtRest:
        if super()._is_fitting():
            return "drop"  # it has optimizers of its own
        return "keep" if same_model else "gather"

    def _wake(self, states: StatesAtRest) -> None:
        """Make the module that rests full; each rank must call.

        Args:
            states: What becomes of the optimizers' states: they stay in shards, rank 0 gathers
                them, or they are dropped.
        """
        engine, rest = self._engine, self._at_rest
        assert engine is not None
        assert rest is not None
        assert self._around_rest is not None
        self._around_rest.close()
        rest.end()
        if states == "gather":
            self._gather_states(engine)
        self._complete_kept(engine)
        engine.detach(restore=True)
        self._restore_dimensions(full=True)
        self._engine = self._at_rest = self._around_rest = None
        if states != "keep":
            self._states_in_shards = None
        coming, self.model = self.model, engine.model
        self._revert_layer_sync()
        self.model = self.model if coming is engine.model else coming

    def _settle_states(self, states: StatesAtRest) -> None:
        """Do with states in shards, beside full parameters, what a run asks for; each must call."""
        assert self._cut_states is not None
        assert self._around_rest is not None
        self._around_rest.close()
        if states == "gather":
            self._gather_states(self._cut_states)
        self._cut_states = self._around_rest = None
        if states != "keep":
            self._states_in_shards = None

    def _gather_states(self, engine: DataParallelEngine) -> None:
        """Bring the optimizers' states together on rank 0; each rank must call."""
        for optimizer in self.optimizers:
            state = full_state_dict(optimizer, engine)
            optimizer.state.clear()
            if state:
                optimizer.load_state_dict(state)

    def _check_states_in_shards(self) -> None:
        """Raise unless the optimizers' states of a fit are cut as an evaluation's parameters are.

        Raises:
            ConfigError: The model is cut in another way than in the fit.
        """
        known, found = self._states_in_shards, [flat.layout for flat in self.engine.flats]
        if known is not None and known != found:
            raise ConfigError(
                f"Rank {self.mesh_rank}: the fit has left its optimizers' states in shards, but "
                f"this run cuts the model in another way; expected the same. Save and load a "
                f"checkpoint in between, freeze and unfreeze parameters after this run, or set "
                f"full_parameters_after_fit=True."
            )
