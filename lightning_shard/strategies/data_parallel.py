"""Replicated data parallel and ZeRO stages 1 to 3 as Lightning strategies: the engine's adapter.

Its ranks choose the size of their buckets, under `bucket_mb="auto"`:

a fit begins        they measure, and choose
an evaluation       the size of the last fit, whose optimizers' states may lie in such shards;
                    before any fit the default, which is not measured
a reconfiguration   of elastic ranks: rank 0's, which has trained, since shards move as they are
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.mesh import NodePlacement
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.agreement import (
    check_same_optimizers,
    check_trainable,
    refuse_embeddings_of_batches,
)
from lightning_shard.data_parallel.bucket_choice import BucketChoice, Links, choose
from lightning_shard.data_parallel.compression import Compressor, Tally
from lightning_shard.data_parallel.compression.compressor import StepBytes, total_bytes
from lightning_shard.data_parallel.deferred_init.start import MetaStart, values_at_start
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes, held, replicated
from lightning_shard.data_parallel.kept_activations import KeptActivations
from lightning_shard.data_parallel.model_split import ModelSplit, has_parts
from lightning_shard.data_parallel.options import (
    ActivationCheckpointing,
    DTypePolicy,
    EngineOptions,
    Offload,
)
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.errors import ConfigError
from lightning_shard.optim.clipping import global_grad_norm
from lightning_shard.optim.host_step import refuse_offload, warn_of_cpu_ranks
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.planning.description import Description, Measure
from lightning_shard.planning.dry_run import dry_run
from lightning_shard.precision.plugins import ShardedMixedPrecision, ShardedPrecision
from lightning_shard.precision.policy import TRUE_DTYPES, dtype_policy
from lightning_shard.precision.scaler import device_scale
from lightning_shard.strategies.dimensions.combined_split import combined
from lightning_shard.strategies.dimensions.dimension import (
    ModuleStep,
    PlainRunner,
    RunView,
    StepKind,
    StepRunner,
)
from lightning_shard.strategies.fit_check import check_fit
from lightning_shard.strategies.fit_ends import EndingStrategy
from lightning_shard.strategies.memory_notes import MemoryNotes, memory_kinds
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.options import DataParallelOptions, RunOptions
from lightning_shard.strategies.trainer._lightning import layer_sync
from lightning_shard.strategies.trainer.announcement import announce, count_parameters
from lightning_shard.strategies.trainer.batch_counts import agree_on_batches, lengths_on_ranks
from lightning_shard.strategies.trainer.callbacks import (
    check_callbacks,
    counted_full,
    draw_graphs,
    prepare_callbacks,
)
from lightning_shard.strategies.trainer.hook_advice import (
    hooks_inside,
    may_change_groups,
    may_edit_gradients,
    usual_clipping,
)
from lightning_shard.strategies.trainer.logs.experiments import shared_loggers
from lightning_shard.strategies.trainer.predictions import PredictedBatches
from lightning_shard.strategies.trainer.same_on_ranks import schedules
from lightning_shard.strategies.trainer.weight_averaging import (
    AverageOfShards,
    Averaging,
    averaging_callbacks,
)


class Buckets:
    """Remembers what a strategy's ranks have chosen.

    Attributes:
        choice: What they have chosen; None before, and where the size is given.
    """

    choice: BucketChoice | None = None

    def begin_fit(self) -> None:
        """Choose anew next time."""
        self.choice = None

    def share(self, strategy: Any, options: EngineOptions) -> None:
        """Go on with the choice of rank 0; each rank must call.

        Args:
            strategy: A `DataParallelStrategy` with its groups.
            options: Options that the strategy was made with.
        """
        if options.bucket_mb == "auto":
            self.choice = strategy.broadcast(self.choice)

    def sized(
        self, strategy: Any, options: EngineOptions, split: ModelSplit | None, *, is_fitting: bool
    ) -> EngineOptions:
        """Return options with a number for "auto"; each rank must call.

        Args:
            strategy: A `DataParallelStrategy` with its groups and its model.
            options: Options of the engine that is to be made.
            split: How the model is split over other ranks.
            is_fitting: Whether the engine is to train.
        """
        if options.bucket_mb != "auto":
            return options
        if self.choice is None and is_fitting:
            links = Links(
                groups=strategy.gradient_groups,
                reducing=strategy._reducing,
                everybody=strategy.collectives,
                device=strategy.root_device,
                are_timed=not strategy.is_in_process,
            )
            self.choice = choose(options, strategy.model, links, split)
        return replace(options, bucket_mb=None if self.choice is None else self.choice.mb)


class DataParallelStrategy(EndingStrategy):
    """One model on every rank, each with its own part of the batch."""

    stage: int
    engine_type: ClassVar[type[DataParallelEngine]] = DataParallelEngine
    keeps_optimizers: ClassVar[bool] = False  # from a fit's beginning to its end
    lays_out_anew: ClassVar[bool] = True  # layers that get another format before the first step
    owns_matrices: ClassVar[bool] = True  # a rank each, for optimizers that need full ones
    memory_kinds = memory_kinds
    dry_run = dry_run
    check_fit = check_fit

    @takes(DataParallelOptions)
    def __init__(self, options: DataParallelOptions) -> None:
        super().__init__(**options.part(RunOptions))
        self._decide_end(options.full_parameters_after_fit)
        self._reduce_dtype = options.reduce_dtype
        self._options = options.engine_options(self.stage)
        self._offload_traffic = Traffic()
        self._activations, self._buckets = KeptActivations(), Buckets()
        self._step_bytes = StepBytes(self._bytes_so_far, self._tally_of_codecs)
        self._memory = MemoryNotes(self)  # for errors
        self._runner: StepRunner | None = None
        self._start: MetaStart | None = None  # until the engine has the parameters
        self._in_hooks = ExitStack()  # around the user's
        self._in_split_model = ExitStack()  # until its dimensions are restored
        self._sharded: list[ShardedOptimizer] = []
        self._replaced: Collection[ShardedOptimizer] = ()  # in the middle of the fit
        self._averages: list[AverageOfShards] = []
        self._failed = False
        self._may_differ_in_batches = False  # of prediction

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        run = self._run_view()
        self.check(run)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._apply_layer_sync()
        self._prepare_model(run)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if fitting:
            self._has_begun = False
            self._step_bytes = StepBytes(self._bytes_so_far, self._tally_of_codecs)
            self._buckets.begin_fit()
            is_local = not self._has_full_parameters
            prepare_callbacks(callbacks, trainer, self.run_module, from_local=is_local)
            if not self._has_full_parameters:
                draw_graphs(trainer, self.run_module, self.root_device)
            self.setup_optimizers(trainer)  # while parameters have their full shapes
            if self._resuming is not None:
                may_change = may_change_groups(self.run_module, callbacks)
                ranks, made = self.collectives, self.optimizers
                self._resuming.check(self._misfits, ranks, made, may_change=may_change)
        num_parameters = count_parameters(self.run_model)
        with self._memory.told("setup"):
            self._start_engine()
        self._take_over_lent()
        self._check_states_in_shards()
        self._folders.read_weights(self)
        self._work_on_engine(trainer)
        if fitting:
            self._follow_data(trainer)
        self.setup_precision_plugin()
        if fitting:
            warn_of_cpu_ranks(self._options, self.root_device)
            if self._announces:
                announce(self, strategy_name(self), num_parameters)

    def check(self, run: RunView) -> None:
        """Refuse what cannot be, before anything is changed; plans ask it, too.

        Raises:
            ConfigError: The module, a callback or an option does not go with this strategy.
        """
        for one in self.dimensions:
            one.check(run)
        if not run.is_fitting:
            return
        if (num_parts := self.data_collectives.size) > 1:
            why = f"{num_parts} ranks have parts of it"
            refuse_embeddings_of_batches(run.module, why)
        callbacks = run.module.trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks(callbacks, averages_shards=self._holds_shards)

    def _work_on_engine(self, trainer: "pl.Trainer") -> None:
        """Let averages, optimizers and hooks of a run work on the engine; each rank must call."""
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        averaging = averaging_callbacks(callbacks, fitting=self._is_fitting())
        self._averages = [self._average_of_shards(one) for one in averaging]
        if self._is_fitting():
            self._check_end()
            besides = schedules(trainer)
            check_same_optimizers(self.optimizers, self.run_model, self.collectives, besides)
            self._sharded = [ShardedOptimizer(opt, self.engine) for opt in self.optimizers]
        self._explain_shards(callbacks)
        self._in_hooks.enter_context(shared_loggers())

    def _follow_formats(self) -> None:
        """Lay out anew layers that user code has given another format; each rank must call.

        Raises:
            ConfigError: The optimizers have a state of the layers already.
        """
        engine = self.engine
        if not engine.adoption.may_reformat or any(one.is_stepping for one in self._sharded):
            return
        asked = engine.in_other_formats()
        if not asked:
            return
        if self.reduce_boolean_decision(any(one.state for one in self.optimizers), all=False):
            engine.adoption.refuse_formats(asked)
        for average in self._averages:
            average.restore(full=True)
        self._complete_kept(engine)
        engine.detach(restore=True)
        self._restore_dimensions(full=True)
        self._detach_optimizers()
        for param, value in asked.items():
            param.data = value if value.shape == param.shape else param.data.to(value.dtype)
        self.model_to_device()
        self._in_hooks.close()
        self._start_engine()
        self._work_on_engine(self.run_module.trainer)

    def _prepare_model(self, run: RunView) -> None:
        """Let the model be what the engine takes: its tensors have values, or those are known."""
        is_brought = any(one.brings_model(run) for one in self.dimensions)
        self._start = values_at_start(
            self.run_model,
            run.device,
            self.mesh_rank,
            self._random_state,
            in_full_on=lambda start: (
                (torch.device("cpu") if is_brought else run.device)
                if self._needs_values(start)
                else None
            ),
        )
        plugin = self.precision_plugin
        with self._asked_formats.kept(self.run_model, TRUE_DTYPES.get(str(plugin.precision))):
            self.model = plugin.convert_module(self.run_model)
        if not is_brought:
            self.model_to_device()

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        if self._start is not None:
            self._start.check_optimizers(self.optimizers)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        kept: list[Optimizer] = super().optimizers
        return kept

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Take optimizers; in the middle of a fit each rank must, with the same ones.

        Raises:
            ConfigError: They are not the same on all ranks, or cannot be exchanged here.
        """
        if self._sharded:
            self._exchange_optimizers(optimizers)
        strategy: Any = Strategy
        strategy.optimizers.fset(self, optimizers)

    def _exchange_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Let other optimizers than those of `configure_optimizers` update shards."""
        raw = [one.optimizer if isinstance(one, LightningOptimizer) else one for one in optimizers]
        if raw == [one.optimizer for one in self._sharded]:
            return
        if self.keeps_optimizers:
            raise ConfigError(
                f"Rank {self.mesh_rank}: the optimizers were replaced in the middle of a fit by "
                f"{', '.join(type(one).__name__ for one in raw) or 'none'}, but "
                f"{type(self).__name__} works with those that configure_optimizers has returned. "
                f"Change their param_groups instead, or use strategy='zero2'."
            )
        check_same_optimizers(raw, self.run_model, self.collectives)
        known = {one.optimizer: one for one in (*self._sharded, *self._replaced)}
        given_up = [one for one in self._sharded if one.optimizer not in raw]
        for one in given_up:
            one.set_aside()
        sharded = [known.get(one) or ShardedOptimizer(one, self.engine) for one in raw]
        for one in sharded:
            one.take_up()
        self._replaced = WeakSet([*self._replaced, *given_up])  # they live as their optimizers do
        self._sharded = sharded

    def _dtypes(self, precision: str) -> DTypePolicy:
        return dtype_policy(precision, self._reduce_dtype)

    def _explain_shards(self, callbacks: Sequence[Callback]) -> None:
        contexts = [one.hook_context() for one in self.dimensions]
        if self._options.stage:
            contexts.insert(0, self._around_hook)
        for context in contexts:
            if context is not None:
                around = hooks_inside(context, self.run_module, callbacks)
                self._in_hooks.enter_context(around)

    def _around_hook(self) -> AbstractContextManager[None]:
        # An elastic fit that cannot go on ends without an engine, and its callbacks hear of it.
        return nullcontext() if self._engine is None else self._engine.hook()

    def _average_of_shards(self, callback: Averaging) -> AverageOfShards:
        return AverageOfShards(
            callback,
            self.engine,
            self.collectives,
            load=lambda state: self.load_model_state_dict({"state_dict": state}),
            share_buffers=self.lightning_module_state_dict,
        )

    def _run_view(self) -> RunView:
        """Return what dimensions may know of this run."""
        return RunView(
            module=self.run_module,
            model=self.run_model,
            mesh=self.mesh,
            rank=self.mesh_rank,
            device=self.root_device,
            is_fitting=self._is_fitting(),
            layer_sync=layer_sync(self),
            matches_tags=self.backend.matches_tags,
            loss_scale=self._loss_scale,
            completed=self._completed,
            forget_activations=self._forget_activations,
            start=self._start,
        )

    def _loss_scale(self) -> Tensor | float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = None if scaler is None else device_scale(scaler)
        return 1.0 if scale is None else scale

    def _completed(self, result: Any) -> Any:
        """Return what a step has returned as code that runs on one rank only can take it."""
        for one in self.dimensions:
            result = one.completed(result)
        return result

    def _forget_activations(self) -> None:
        for one in self.dimensions:
            one.forget_activations()

    def _start_engine(self) -> None:
        plugin = self.precision_plugin
        assert isinstance(plugin, ShardedPrecision)
        run = self._run_view()
        trainer: Any = run.module.trainer
        if self._is_fitting():
            self._activations.begin(self.run_model, self._options)
        splits = [split for one in self.dimensions if (split := one.split(run)) is not None]
        split = combined(splits)
        if self._start is not None and split is not None:
            self._start.split = split
        shows_weights = split is not None and self._options.stage < 3
        options = replace(
            self._options,
            dtypes=self._dtypes(str(plugin.precision)),
            owned=self._parameters_to_own(split),
            offload=self._options.offload_of(is_fitting=self._is_fitting()),
            start=self._start,
            # Else the engine, and a module that is left in shards, would keep the strategy.
            seeing_shards=self._seeing_shards if shows_weights else nullcontext,
            # The first dimension splits the full model, so what it shows lies around the others'.
            around_backward=[make for one in self.dimensions if (make := one.backward_context())],
            waits_in_backward=any(one.waits_in_backward for one in self.dimensions),
            expects_edits=self._is_fitting() and may_edit_gradients(run.module, trainer.callbacks),
            may_reformat=self.lays_out_anew,
        )
        options = self._buckets.sized(self, options, split, is_fitting=self._is_fitting())
        self._engine = engine = self.engine_type(
            self.run_model, self.gradient_groups, options, self._reducing, split
        )
        if engine.copier is not None:
            self._offload_traffic = engine.copier.traffic
        if self._start is not None:  # parameters have their values
            self._start.end()
            self._start = None
        if self._is_fitting():
            self._activations.attach(engine)
            engine.clipping.expect(*usual_clipping(run.module), self.run_model.parameters())
        plugin.attach(engine)
        if isinstance(plugin, ShardedMixedPrecision) and plugin.scaler is not None:
            for exchange in engine.exchanges:
                exchange.loss_scale = partial(device_scale, plugin.scaler)
        for one in self.dimensions:
            one.attach(engine)
        shapes = {param: engine.full_shape(param) for param in self.run_model.parameters()}
        self._in_split_model.enter_context(counted_full(shapes))
        # Stage 3 gathers blocks together: which ones a step leaves out at random has to agree.
        apart = run.drawn_for_own_data if self._options.stage < 3 else nullcontext
        self._runner = PlainRunner(engine.step, apart)
        for one in reversed(self.dimensions):
            self._runner = one.wrapped(self._runner)

    def _needs_values(self, start: MetaStart | None) -> bool:
        """Whether parameters on meta need their values before ranks cut the model; each calls."""
        del start
        return False

    @property
    def _splits_model(self) -> bool:
        """Whether a rank has a part of the model only."""
        return False

    def _parameters_to_own(self, split: ModelSplit | None) -> Collection[nn.Parameter]:
        """Return the parameters that optimizers of full matrices need on one rank each."""
        gathers = split is not None and split.parts is not None
        is_cut = gathers if has_parts(split) else self._options.stage > 0
        compresses = self._options.compression is not None
        updates = self._is_fitting() or self._states_in_shards is not None  # those of the fit
        is_apart = split is not None and bool(split.fewer_ranks)
        if not updates or not is_cut or compresses or is_apart:
            return frozenset()
        if not self.owns_matrices:
            return frozenset()
        owned = parameters_to_own(self.optimizers, self.run_model)
        if owned and self._options.offload is not None:
            raise refuse_offload(self._options.offload, self.optimizers)
        if owned:  # ranks that lay parameters out differently could not even compare models
            check_same_optimizers(self.optimizers, self.run_model, self.collectives)
        return owned

    def _run_step(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self._follow_formats()
        if kind == "training" or not self._is_fitting():  # each look is a message between stages
            self.engine.adoption.may_reformat = False
        assert self._runner is not None
        with self._memory.running(kind, args[0]):
            step = self._memory.noting(step)
            if kind == "training":
                step = self._activations.around(step)
            return self._runner.run(kind, step, args, kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_begun and self.run_module.automatic_optimization:
            check_trainable(self.run_module)
        self._has_begun = True
        with self._step_bytes.counting():
            return self._run_step("training", super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        return self._run_step("validation", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        return self._run_step("test", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        self.predicted.note(*args)
        return self._run_step("predict", super().predict_step, args, kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._engine is not None:
            self._follow_formats()  # those of on_fit_start
        super().load_optimizer_state_dict(checkpoint)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        sampler = getattr(dataloader, "sampler", None)
        if self._seed is not None and isinstance(sampler, DistributedSampler):
            sampler.seed = self._seed  # with another, ranks would draw from different orders
        lengths = lengths_on_ranks(dataloader, self.collectives)
        if self._is_predicting:  # Lightning gives each rank its own samples, none twice
            self._may_differ_in_batches |= len(set(lengths)) > 1 or None in lengths
            return dataloader
        return agree_on_batches(
            dataloader,
            lengths,
            self.collectives,
            self.root_device,
            is_training=module is None or bool(module.trainer.training),
        )

    @property
    def _is_predicting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.predicting

    @override
    def on_predict_start(self) -> None:
        trainer = self.run_module.trainer
        self.predicted = PredictedBatches(trainer, self.data_collectives.rank)
        if self._may_differ_in_batches:
            self.engine.hold_parameters()
        super().on_predict_start()

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of the averaged gradient over full parameters; each rank must call.

        Args:
            optimizer: Counts its parameters; None counts all of the model's.
            norm_type: p of the p-norm, or infinity.

        Returns:
            Shape (), the same on every rank.
        """
        groups = [] if optimizer is None else optimizer.param_groups
        params = [one for group in groups for one in group["params"]]
        of_all = [param for flat in self.engine.flats for param in flat.params]
        return global_grad_norm(of_all if optimizer is None else params, self.engine, norm_type)

    @property
    def offload(self) -> Offload | None:
        """What a fit has in host memory; None without offload."""
        return self._options.offload

    @property
    def offload_traffic(self) -> Traffic:
        """What this rank has copied "down" to host memory and "up", in this run or the last."""
        return self._offload_traffic

    def held_bytes(self) -> HeldBytes:
        """Return the bytes that this rank holds now, counted by storage."""
        return held(self.engine, self.optimizers)

    def replicated_bytes(self) -> HeldBytes:
        """Return the bytes of a rank if every rank held everything; each rank must call."""
        return replicated(self.engine, self.optimizers)

    @property
    def activation_traffic(self) -> Traffic:
        """What this rank has copied of activations, as `offload_traffic` counts parameters."""
        return self._activations.traffic

    @property
    def bucket_choice(self) -> BucketChoice | None:
        """What `bucket_mb="auto"` has come to in the last fit; None where the size is given."""
        return self._buckets.choice

    @property
    def compression(self) -> Compressor | None:
        """The compressor of gradients; None without compression."""
        return self._options.compression

    def compression_tally(self) -> Tally:
        """Bytes that this rank has sent in training steps, and what they would be dense.

        All that a step sends counts: see `step_bytes`. Of this run, or after it of the last fit.
        """
        return self._step_bytes.tally

    def _tally_of_codecs(self) -> Tally:
        exchanges = [] if self._engine is None else self._engine.exchanges
        return sum((exchange.tally for exchange in exchanges), Tally())

    def _bytes_so_far(self) -> int:
        groups = [self._collectives, *([] if self._reducing is None else self._reducing.all)]
        return total_bytes(group.traffic for group in groups if group is not None)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._step_bytes.counting(), self._memory.told("backward"):
            return super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_formats()  # before the optimizer runs, which may call the step
        with self._step_bytes.counting(), self._memory.told("optimizer_step"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def teardown(self) -> None:
        self._in_hooks.close()
        self._activations.end()
        self._end_run()
        self._sharded, self._averages, self._failed = [], [], False
        self._runner, self._replaced = None, ()
        self._may_differ_in_batches, self._memory = False, MemoryNotes(self)
        super().teardown()

    @property
    def shard_size(self) -> int:
        """How many of the ranks that average gradients share out a copy of the state: here, all."""
        return self.mesh.dp

    @property
    def held_besides(self) -> list[str]:
        """Names of what each rank of a fit holds besides the bytes that can be known before it."""
        compressed = self._options.compression is not None
        found = [name for one in self.dimensions for name in one.held_besides]
        return [*["what compression keeps"] * compressed, *found]

    def placement(self, ranks_per_node: int) -> NodePlacement:
        """Say which groups reach over nodes of so many neighbouring ranks, and what is slow."""
        return self.mesh.placement(ranks_per_node)

    def with_checkpointing(self, choice: ActivationCheckpointing | None) -> Self:
        """Return a copy for a dry run, with other activations computed again."""
        made = copy.copy(self)
        made._options = replace(made._options, activation_checkpointing=choice)
        return made

    def described(
        self, module: "pl.LightningModule", precision: str, measure: Measure
    ) -> Description:
        """Say what the ranks of a world have and do, for a dry run; nothing is set up.

        Args:
            module: The module to describe, as in `dry_run`.
            precision: Precision string, as for the Trainer.
            measure: Measures the blocks of the module.
        """
        options = self._options
        engine = replace(options, dtypes=self._dtypes(precision), compression=None, offload=None)
        found = Description(
            mesh=self.mesh,
            engine=engine,
            shard_size=self.shard_size,
            dimensions=self.dimensions,
            offload=options.offload,
        )
        checkpointing = checkpointed_blocks(
            module, engine.activation_checkpointing, engine.units, reads_buffers=False
        )
        with checkpointing:  # which what is measured depends on
            for one in reversed(self.dimensions):
                found = one.described(found, module, measure)
        return found


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
