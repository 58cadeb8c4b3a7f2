"""The engine of a run: made from a strategy's options, and what works on it until teardown.

Its ranks choose the size of their buckets, under `bucket_mb="auto"`:

a fit begins        they measure, and choose
an evaluation       the size of the last fit, whose optimizers' states may lie in such shards;
                    before any fit the default, which is not measured
a reconfiguration   of elastic ranks: rank 0's, which has trained, since shards move as they are
"""

import copy
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.data_parallel.agreement import (
    check_same_optimizers,
    refuse_embeddings_of_batches,
)
from lightning_shard.data_parallel.bucket_choice import BucketChoice, Links, choose
from lightning_shard.data_parallel.deferred_init.start import (
    MetaStart,
    noted_alike,
    values_at_start,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.quantised import take_over
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit, combined, has_parts
from lightning_shard.data_parallel.optimizer_entries import StateBlocks
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim.blockwise import states_in_blocks
from lightning_shard.optim.host_step import refuse_offload, warn_of_cpu_ranks
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import (
    LaidOutAnew,
    ShardedOptimizer,
    check_optimizer,
)
from lightning_shard.planning.dry_run import SimulatedEnvironment
from lightning_shard.planning.simulated_model import SimulatedCollectives
from lightning_shard.precision.plugins import ShardedPrecision, device_scale
from lightning_shard.precision.policy import TRUE_DTYPES, dtype_policy
from lightning_shard.strategies.dimensions.dimension import (
    PlainRunner,
    RunView,
    StepRunner,
)
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer._lightning import connect, layer_sync
from lightning_shard.strategies.trainer.announcement import announce, count_parameters
from lightning_shard.strategies.trainer.callbacks import (
    AverageOfShards,
    Averaging,
    averaging_callbacks,
    check_callbacks,
    counted_full,
    draw_graphs,
    prepare_callbacks,
)
from lightning_shard.strategies.trainer.hook_advice import (
    calls_user_code,
    hooks_inside,
    may_change_groups,
    may_edit_gradients,
    usual_clipping,
)
from lightning_shard.strategies.trainer.layer_sync import layer_sync_over
from lightning_shard.strategies.trainer.logs.experiments import shared_loggers
from lightning_shard.strategies.trainer.same_on_ranks import schedules
from lightning_shard.strategies.trainer.step_collectives import default_group_is
from lightning_shard.strategies.trainer.weights_in_hooks import WeightsInHooks
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.tensor_parallel.randomness import drawn_apart

_OF_FAILURES = ("on_exception",)  # hooks in which the other ranks may be elsewhere


class _SplitOfNobody(ModelSplit):
    """Parts of layers, or stages, on ranks that are not there."""

    def __init__(self, size: int, *, of_layers: bool) -> None:
        self.groups = (SimulatedCollectives(0, size),)
        self.groups_of_layers = self.groups if of_layers else ()

    @property
    def parts(self) -> Any:
        """The split itself, where ranks have parts of the same layers."""
        return None if self.groups_of_layers else self


class EngineSetup(RunPart):
    """Makes the engine, and lets optimizers, averages and hooks work on it.

    Attributes:
        in_split_model: What holds until the dimensions are restored.
        bucket_choice: What the ranks have chosen; None before, and where the size is given.
        offload_traffic: What this rank has copied to host memory and back, in this run or the last.
    """

    def __init__(self, run: Any, reduce_dtype: str | None) -> None:
        super().__init__(run)
        self.reduce_dtype = reduce_dtype
        self.sharded: list[ShardedOptimizer] = []
        self._replaced: Collection[ShardedOptimizer] = ()  # in the middle of the fit
        self.averages: list[AverageOfShards] = []
        self.in_hooks, self.in_split_model = ExitStack(), ExitStack()
        self.bucket_choice: BucketChoice | None = None
        self.offload_traffic = Traffic()
        self.random_state: Tensor | None = None
        self._start: MetaStart | None = None  # until the engine has the parameters
        self._synced: LayerSync | None = None  # who has exchanged the model's batch norms
        self._weights: WeightsInHooks | None = None  # as hooks see them, where they are split

    def set_up(self, trainer: "pl.Trainer") -> None:
        """Make the engine of a run, and of a fit the optimizers before it; each rank must call."""
        run, strategy = self.run, self.strategy
        fitting = run.is_in_fit
        if fitting:
            run.hooks.begin_run(trainer)
        view = self.view()
        self.check(view)
        strategy.accelerator.setup(trainer)
        if fitting:
            self.apply_layer_sync()
        self._prepare_model(view)
        if fitting:
            self._prepare_fit(trainer)
        num_parameters = count_parameters(run.model)
        with run.steps.memory.told("setup"):
            self.start_engine()
        run.checkpoints.take_over_lent()
        run.end.check_states_in_shards()
        run.checkpoints.folders.read_weights(run.checkpointed)
        self._work_on_engine(trainer)
        if fitting:
            run.checkpoints.follow_data(trainer)
        strategy.setup_precision_plugin()
        if fitting:
            warn_of_cpu_ranks(run.options, strategy.root_device)
            if run.announces:
                announce(strategy, strategy_name(strategy), num_parameters)
        run.steps.begin_run()
        if fitting:
            run.hooks.begin_fit(trainer)

    def _prepare_fit(self, trainer: "pl.Trainer") -> None:
        """Make the optimizers, while parameters have their full shapes; each rank must call."""
        run, module, callbacks = self.run, self.run.module, trainer.callbacks  # type: ignore[attr-defined]
        run.steps.begin_fit()
        self.bucket_choice = None
        prepare_callbacks(callbacks, trainer, module, from_local=not run.has_full_parameters)
        if not run.has_full_parameters:
            draw_graphs(trainer, module, self.strategy.root_device)
        self.strategy.setup_optimizers(trainer)
        run.checkpoints.check_resuming(may_change=may_change_groups(module, callbacks))

    def check(self, view: RunView) -> None:
        """Refuse what cannot be, before anything is changed; plans ask it, too."""
        for one in self.strategy.dimensions:
            one.check(view)
        if not view.is_fitting:
            return
        if self.run.same_bits.is_on:
            self.run.same_bits.check(view)
        if (num_parts := self.strategy.data_collectives.size) > 1:
            why = f"{num_parts} ranks have parts of it"
            refuse_embeddings_of_batches(view.module, why)
        callbacks = view.module.trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks(
            callbacks,
            averages_shards=self.run.holds_shards,
            splits_model=self.run.groups.splits_model,
        )

    def check_fit(
        self,
        module: "pl.LightningModule",
        optimizers: Sequence[Optimizer],
        *,
        world_size: int,
        layer_sync: LayerSync | None,
    ) -> None:
        """Refuse a fit of so many ranks, of a copy without elements, that could not be set up."""
        asked = copy.copy(self.strategy)
        asked.cluster_environment = SimulatedEnvironment(world_size)
        asked.parallel_devices = [torch.device("cpu")] * world_size
        run, groups = asked.run, asked.run.groups
        groups.everybody = SimulatedCollectives(0, world_size)
        connect(asked, module, layer_sync)
        asked.model = module
        groups.make(lambda ranks: SimulatedCollectives(0, len(ranks)))
        run.setup.check(run.setup.view())
        sizes = {one.axis: asked.mesh.size(one.axis) for one in asked.dimensions}
        parts = [
            _SplitOfNobody(size, of_layers=one == "pp") for one, size in sizes.items() if size > 1
        ]
        asked.optimizers = list(optimizers)
        check_same_optimizers(asked.optimizers, module, groups.everybody)
        options = replace(run.options, **run.setup.laid_out_for(combined(parts)))
        held = SimpleNamespace(model=module, options=options, split=combined(parts) or Unsplit())
        held.collectives = groups.everybody
        for optimizer in asked.optimizers:
            check_optimizer(optimizer, held)

    def view(self) -> RunView:
        """Return what dimensions may know of this run."""
        strategy, run = self.strategy, self.run
        found = RunView(
            module=run.module,
            model=run.model,
            mesh=strategy.mesh,
            rank=strategy.mesh_rank,
            device=strategy.root_device,
            is_fitting=run.is_fitting(),
            layer_sync=layer_sync(strategy),
            matches_tags=strategy.backend.matches_tags,
            loss_scale=self._loss_scale,
            completed=self.completed,
            forget_activations=self._forget_activations,
            start=self._start,
            in_order=run.same_bits if run.same_bits.is_on else None,
        )
        if not strategy.dimensions:
            return found
        along = run.groups.of_models.along
        return replace(
            found,
            groups=along,
            of_forwards=[along[axis] for axis in run.groups.sample_axes[1:]],
            of_parts=run.groups.of_models.of_parts,
            with_shards=self.hidden,
            in_hook=partial(self.in_hook, by_engine=False),
            drawn_for_own_data=self._drawn_for_own_data,
        )

    def _loss_scale(self) -> Tensor | float:
        scale = device_scale(self.strategy.precision_plugin)
        return 1.0 if scale is None else scale

    def completed(self, result: Any) -> Any:
        """Return what a step has returned as code that runs on one rank only can take it."""
        return full_tensor(result) if self.strategy.dimensions else result

    def _forget_activations(self) -> None:
        for one in self.strategy.dimensions:
            one.forget_activations()

    def _drawn_for_own_data(self) -> AbstractContextManager[None]:
        """Inside, data-parallel ranks draw random numbers of their own; those of a model alike."""
        data = self.strategy.data_collectives
        return drawn_apart(data, self.strategy.root_device) if data.size > 1 else nullcontext()

    # --- the model before the engine --------------------------------------------------------------

    def _prepare_model(self, view: RunView) -> None:
        """Let the model be what the engine takes: its tensors have values, or those are known."""
        strategy = self.strategy
        is_brought = any(one.brings_model(view) for one in strategy.dimensions)
        self._start = values_at_start(
            self.run.model,
            view.device,
            strategy.mesh_rank,
            self.random_state,
            in_full_on=lambda start: (
                (torch.device("cpu") if is_brought else view.device)
                if self._needs_values(start)
                else None
            ),
        )
        plugin = strategy.precision_plugin
        asked = TRUE_DTYPES.get(str(plugin.precision))
        with self.run.loops.asked_formats.kept(self.run.model, asked):
            strategy.model = plugin.convert_module(self.run.model)
        take_over(self.run.model)  # before optimizers are made of the parameters
        if not is_brought:
            strategy.model_to_device()

    def _needs_values(self, start: MetaStart | None) -> bool:
        """Whether parameters on meta need their values before ranks cut the model; each calls."""
        groups = self.run.groups
        return groups.splits_model and not noted_alike(start, groups.all_ranks)

    def check_optimizers(self) -> None:
        """Refuse optimizers that were made with values which parameters do not have yet."""
        if self._start is not None:
            self._start.check_optimizers(self.strategy.optimizers)

    def apply_layer_sync(self) -> None:
        """Let batch norms know all batches of a step, where the user has asked for it."""
        strategy = self.strategy
        data = strategy.gradient_groups.dp  # what ranks compute of one sample counts together
        sync, device = layer_sync(strategy), strategy.root_device
        self._synced = layer_sync_over(data, sync, device, strategy.mesh_size)
        if self._synced is not None:
            strategy.model = self._synced.apply(self.run.model)

    def revert_layer_sync(self) -> None:
        """Exchange synchronised batch norms for those of the user's module."""
        if self._synced is not None and self.strategy.model is not None:
            self.strategy.model = self._synced.revert(self.strategy.model)
        self._synced = None

    # --- the engine -------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Split the model, and make its engine; each rank must call."""
        run, strategy, dimensions = self.run, self.strategy, self.strategy.dimensions
        view = self.view()
        if view.is_fitting:
            run.steps.activations.begin(view.model, run.options)
        splits = [split for one in dimensions if (split := one.split(view)) is not None]
        split = combined(splits)
        if self._start is not None and split is not None:
            self._start.split = split
        options, reducing = self._engine_options(view, split), run.groups.reducing
        groups = strategy.gradient_groups
        run.engine = engine = run.hooks.engine_type(run.model, groups, options, reducing, split)
        if engine.copier is not None:
            self.offload_traffic = engine.copier.traffic
        if self._start is not None:  # parameters have their values
            self._start.end()
            self._start = None
        if view.is_fitting:
            run.steps.activations.attach(engine)
            engine.clipping.expect(*usual_clipping(view.module), run.model.parameters())
        self._attach(engine)
        shapes = {param: engine.full_shape(param) for param in run.model.parameters()}
        self.in_split_model.enter_context(counted_full(shapes))
        # Stage 3 gathers blocks together: which ones a step leaves out at random has to agree.
        is_apart = run.options.stage < 3 and not run.options.same_bits
        apart = view.drawn_for_own_data if is_apart else nullcontext
        runner: StepRunner = PlainRunner(engine.step, apart)
        for one in reversed(dimensions):
            runner = one.runner(runner)
        contexts = [make for one in dimensions if (make := one.step_context())]
        run.steps.run_by(runner, [self.ranks_in_step, *contexts])

    def _engine_options(self, view: RunView, split: ModelSplit | None) -> EngineOptions:
        run, strategy, dimensions = self.run, self.strategy, self.strategy.dimensions
        trainer: Any = view.module.trainer
        shows_weights = split is not None and run.options.stage < 3
        options = replace(
            run.options,
            dtypes=self.dtypes(str(strategy.precision_plugin.precision)),
            **self.laid_out_for(split),
            offload=run.options.offload_of(is_fitting=view.is_fitting),
            start=self._start,
            loss_scale=partial(device_scale, strategy.precision_plugin),
            # Else the engine, and a module that is left in shards, would keep the strategy.
            seeing_shards=self.hidden if shows_weights else nullcontext,
            # The first dimension splits the full model, so what it shows lies around the others'.
            around_backward=[make for one in dimensions if (make := one.backward_context())],
            waits_in_backward=any(one.waits_in_backward for one in dimensions),
            expects_edits=view.is_fitting and may_edit_gradients(view.module, trainer.callbacks),
            may_reformat=strategy.lays_out_anew,
            takes_newcomers=strategy.lays_out_anew and run.options.compression is None,
        )
        return self._sized(options, split, is_fitting=view.is_fitting)

    def _attach(self, engine: DataParallelEngine) -> None:
        plugin = self.strategy.precision_plugin
        assert isinstance(plugin, ShardedPrecision)
        plugin.attach(engine)
        for one in self.strategy.dimensions:
            one.attach(engine)

    def dtypes(self, precision: str) -> DTypePolicy:
        """Return the formats in which parameters are kept, computed with and averaged."""
        return dtype_policy(self.run.hooks.computed_in(precision), self.reduce_dtype)

    def _sized(
        self, options: EngineOptions, split: ModelSplit | None, *, is_fitting: bool
    ) -> EngineOptions:
        """Return options with a number for "auto"; each rank must call."""
        if options.bucket_mb != "auto":
            return options
        strategy = self.strategy
        if self.bucket_choice is None and is_fitting:
            links = Links(
                groups=strategy.gradient_groups,
                reducing=self.run.groups.reducing,
                everybody=strategy.collectives,
                device=strategy.root_device,
                are_timed=not strategy.is_in_process,
            )
            self.bucket_choice = choose(options, strategy.model, links, split)
        return replace(
            options, bucket_mb=None if self.bucket_choice is None else self.bucket_choice.mb
        )

    def share_bucket_choice(self) -> None:
        """Go on with the choice of rank 0; each rank must call."""
        if self.run.options.bucket_mb == "auto":
            self.bucket_choice = self.strategy.broadcast(self.bucket_choice)

    def laid_out_for(self, split: ModelSplit | None) -> dict[str, Any]:
        """Return the options of the engine that tell how the optimizers' state has to lie."""
        run, optimizers = self.run, self.strategy.optimizers
        updates = run.is_fitting() or run.end.has_states  # those of the fit
        blocks: Mapping[nn.Parameter, StateBlocks] = {}
        if updates and split is None and run.options.stage > 0 and self.strategy.cuts_at_blocks:
            blocks = states_in_blocks(optimizers, run.model)
        owned = self._parameters_to_own(split, blocks)
        if owned or blocks:  # ranks that lay parameters out differently could not compare models
            check_same_optimizers(optimizers, run.model, run.groups.all_ranks)
        return {"blocks": blocks, "owned": owned}

    def _parameters_to_own(
        self, split: ModelSplit | None, blocks: Container[nn.Parameter]
    ) -> Collection[nn.Parameter]:
        """Return the parameters that optimizers of full matrices need on one rank each."""
        run, optimizers = self.run, self.strategy.optimizers
        gathers = split is not None and split.parts is not None
        is_cut = gathers if has_parts(split) else run.options.stage > 0
        updates = run.is_fitting() or run.end.has_states  # those of the fit
        is_apart = split is not None and bool(split.fewer_ranks)
        if not updates or not is_cut or run.options.compression is not None or is_apart:
            return frozenset()
        if not self.strategy.owns_matrices:
            return frozenset()
        owned = parameters_to_own(optimizers, run.model, blocks)
        if owned and run.options.offload is not None:
            raise refuse_offload(run.options.offload, optimizers)
        return owned

    # --- what works on the engine -----------------------------------------------------------------

    def _work_on_engine(self, trainer: "pl.Trainer", before: LaidOutAnew | None = None) -> None:
        """Let averages, optimizers and hooks of a run work on the engine; each rank must call."""
        run, strategy = self.run, self.strategy
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        is_fitting = run.is_fitting()
        averaging = averaging_callbacks(callbacks, fitting=is_fitting)
        self.averages = [self._average_of_shards(one) for one in averaging]
        if is_fitting:
            run.end.check()
            besides = schedules(trainer)
            check_same_optimizers(strategy.optimizers, run.model, strategy.collectives, besides)
            self.renew_optimizers(before)
        self._look_full_in_hooks(callbacks)
        for around in self.run.same_bits.around_hooks(callbacks):
            self.in_hooks.enter_context(around)

    def _average_of_shards(self, callback: Averaging) -> AverageOfShards:
        strategy = self.strategy
        return AverageOfShards(
            callback,
            strategy.engine,
            strategy.collectives,
            load=lambda state: strategy.load_model_state_dict({"state_dict": state}),
            share_buffers=strategy.lightning_module_state_dict,
        )

    def _look_full_in_hooks(self, callbacks: Sequence[Callback]) -> None:
        """Let hooks see full weights of a model that is split, and explain errors on shards."""
        strategy, module, stage = self.strategy, self.run.module, self.run.options.stage
        configs = strategy.lr_scheduler_configs
        also = ["lr_scheduler_step"] * any(calls_user_code(one.scheduler) for one in configs)
        if stage or strategy.dimensions:
            explained = hooks_inside(self._explained, module, callbacks, also=also)
            self.in_hooks.enter_context(explained)
        self.in_hooks.enter_context(shared_loggers())
        if isinstance(strategy.engine.split, Unsplit) or stage == 3:
            return
        averages = averaging_callbacks(callbacks, fitting=True)  # which know of shards
        others = [one for one in callbacks if one not in averages]
        more = strategy.mesh_rank, self._finish_copies, self._follow
        self._weights = weights = WeightsInHooks(strategy.engine, *more)
        shown = hooks_inside(weights.shown, module, others, _OF_FAILURES, also=also)
        self.in_hooks.enter_context(shown)

    def _finish_copies(self) -> None:
        for one in reversed(self.strategy.dimensions):
            one.finish_copies()

    def _follow(self) -> dict[Tensor, Callable[[], Tensor]]:
        dimensions = self.strategy.dimensions
        return {key: bring for one in dimensions for key, bring in one.follow().items()}

    def hidden(self) -> AbstractContextManager[object]:
        """Inside, weights are the shards that are here, also within a hook."""
        return having(asker, Asker.ENGINE) if self._weights is None else self._weights.hidden()

    @contextmanager
    def _explained(self, *, by_engine: bool = True) -> Iterator[None]:
        """Run a hook inside, whose errors on shards are explained."""
        with ExitStack() as stack:
            for one in self.strategy.dimensions:
                stack.enter_context(one.around_hook())
            # An elastic fit that cannot go on ends without an engine, and its callbacks hear of it.
            if by_engine and self.run.options.stage and self.run.engine is not None:
                stack.enter_context(self.run.engine.hook())
            yield

    @contextmanager
    def in_hook(self, *, by_engine: bool = True) -> Iterator[None]:
        """Inside, weights look full, as in a hook; each rank must enter."""
        weights = nullcontext() if self._weights is None else self._weights.shown()
        with weights, self._explained(by_engine=by_engine):
            yield

    def ranks_in_step(self) -> AbstractContextManager[None]:
        """Inside, the default group is that of other samples, where models are shared."""
        if not self.strategy.dimensions:
            return nullcontext()
        return default_group_is(self.strategy.data_collectives.group)

    def follow_model(self) -> None:
        """Lay the model out anew where it has other formats or parameters; each must call."""
        strategy, engine = self.strategy, self.strategy.engine
        if any(one.is_stepping for one in self.sharded):
            return
        asked = engine.in_other_formats() if engine.adoption.may_reformat else {}
        if not asked and not engine.has_other_parameters():
            return
        if asked and strategy.reduce_boolean_decision(
            any(one.state for one in strategy.optimizers), all=False
        ):
            engine.adoption.refuse_formats(asked)
        for average in self.averages:
            average.check_paired()  # before anything is taken down: after it a refusal is lost
        laid_out = LaidOutAnew(engine, [*self.sharded, *self._replaced])
        for average in self.averages:
            average.restore(full=True)
        self.run.end.complete_kept(engine)
        engine.detach(restore=True)
        self.run.end.restore_dimensions(full=True)
        laid_out.detach_optimizers()
        for param, value in asked.items():
            param.data = value if value.shape == param.shape else param.data.to(value.dtype)
        strategy.model_to_device()
        self.in_hooks.close()
        self.start_engine()
        self._work_on_engine(self.run.module.trainer, laid_out)

    # --- optimizers -------------------------------------------------------------------------------

    def renew_optimizers(self, before: LaidOutAnew | None = None) -> None:
        """Let the optimizers of the fit update the engine's shards."""
        if before is None:
            self.sharded = [self._sharded(one) for one in self.strategy.optimizers]
            return
        number, renewed = len(self.sharded), before.attach_optimizers(self.strategy.engine)
        self.sharded, others = renewed[:number], renewed[number:]
        for one in others:
            one.set_aside()
        self._replaced = WeakSet(others)

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        return ShardedOptimizer(optimizer, self.strategy.engine, around_hooks=self.in_hook)

    def exchange_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Let other optimizers than those of `configure_optimizers` update shards."""
        if not self.sharded:
            return
        raw = [one.optimizer if isinstance(one, LightningOptimizer) else one for one in optimizers]
        if raw == [one.optimizer for one in self.sharded]:
            return
        strategy = self.strategy
        if strategy.keeps_optimizers:
            raise ConfigError(
                f"Rank {strategy.mesh_rank}: the optimizers were replaced in the middle of a fit "
                f"by {', '.join(type(one).__name__ for one in raw) or 'none'}, but "
                f"{type(strategy).__name__} works with those that configure_optimizers has "
                f"returned. Change their param_groups instead, or use strategy='zero2'."
            )
        check_same_optimizers(raw, self.run.model, strategy.collectives)
        known = {one.optimizer: one for one in (*self.sharded, *self._replaced)}
        given_up = [one for one in self.sharded if one.optimizer not in raw]
        for one in given_up:
            one.set_aside()
        sharded = [known.get(one) or self._sharded(one) for one in raw]
        for one in sharded:
            one.take_up()
        self._replaced = WeakSet([*self._replaced, *given_up])  # they live as their optimizers do
        self.sharded = sharded

    def detach_optimizers(self) -> None:
        """Let optimizers update full parameters again; exchanged ones begin anew after the fit."""
        for sharded in self.sharded:
            sharded.detach()
        for sharded in self._replaced:
            sharded.detach()
            sharded.optimizer.state.clear()

    def end(self) -> None:
        """Forget what has worked on the engine of the run that ends."""
        self.sharded, self.averages, self._replaced = [], [], ()

    def end_hiding(self) -> None:
        """Undo what a set-up that has failed left split; the weights are what they are now."""
        if self.run.end.at_rest is None:
            self.run.end.restore_dimensions(full=False)
        self._weights = None
