"""The steps of a run, and what it puts into its Trainer's loops around them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import Asker, MakesContext, asker, having, setting
from lightning_shard.data_parallel.agreement import check_trainable
from lightning_shard.data_parallel.compression.compressor import StepBytes
from lightning_shard.data_parallel.kept_activations import KeptActivations
from lightning_shard.errors import ConfigError
from lightning_shard.precision.policy import TRUE_DTYPES, AskedFormats
from lightning_shard.strategies.dimensions.dimension import ModuleStep, StepKind, StepRunner
from lightning_shard.strategies.memory_notes import MemoryNotes
from lightning_shard.strategies.micro_batches import EPOCH_END, UPDATE
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer._lightning import (
    before_batches,
    before_training_ends,
    seed_workers,
    without_sigterm_broadcast,
)
from lightning_shard.strategies.trainer.batch_samplers import (
    PredictedBatches,
    assigns_batch_samplers,
)
from lightning_shard.strategies.trainer.hook_advice import explaining_weights_elsewhere
from lightning_shard.strategies.trainer.same_on_ranks import SameBatches, SettingsOfSteps
from lightning_shard.strategies.trainer.shared_values import common_values
from lightning_shard.strategies.trainer.step_collectives import MetricGroups


class RunLoops(RunPart):
    """Begins steps on all ranks together, and compares at some what may come apart."""

    compares = True
    _settings: SettingsOfSteps

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.in_run = ExitStack()
        self.asked_formats = AskedFormats()
        self._around_comparison: MakesContext = nullcontext

    def compare_over(self, collectives: Collectives) -> None:
        """Compare what hooks and schedulers change over a group of all ranks."""
        numbers = "" if self.strategy.meets_at_steps else "lr "
        self.strategy.precision_plugin.clipped_by = None  # newcomers have clipped nothing
        self._settings = SettingsOfSteps(collectives, numbers)

    def begin(self, trainer: "pl.Trainer") -> None:
        """Take part in a run's loops; each rank must call before Lightning handles signals."""
        strategy, run = self.strategy, self.run
        run.termination.watch(trainer)
        self.end()
        if str(strategy.precision_plugin.precision) in TRUE_DTYPES:
            self.asked_formats.begin()  # until the module is converted
        self.in_run.enter_context(
            assigns_batch_samplers(
                trainer,
                lambda: strategy.distributed_sampler_kwargs,
                strategy.broadcast,
                training=not strategy.assigns_samples,
                predictions=strategy.is_in_process,
                in_order=run.same_bits.is_on,
            )
        )
        if run.termination.lifeline is not None:
            self.in_run.enter_context(without_sigterm_broadcast(trainer))
        self.in_run.enter_context(before_batches(trainer, partial(self._begin_batch, trainer)))
        self.in_run.enter_context(common_values(trainer, strategy))
        self.in_run.enter_context(run.same_bits.in_run(trainer))
        self.in_run.enter_context(before_training_ends(trainer, self._end_steps))
        explained = partial(explaining_weights_elsewhere, strategy.mesh_rank)
        self.in_run.enter_context(run.checkpoints.saving_in_run(trainer, explained))

    def end(self) -> None:
        """Leave the trainer as it was."""
        self.asked_formats.end()
        self.in_run.close()

    def begin_step(self) -> None:
        """Begin a step, or end the run before it on all ranks, see `RunTermination.begin_step`."""
        module = self.strategy.lightning_module
        trainer = None if module is None else module.trainer
        try:
            self.run.termination.begin_step(trainer, self.strategy.cluster_environment)
        except BaseException:
            if self.run.termination.has_stopped_all:
                self.run.hooks.stop_together()
            raise

    def _begin_batch(self, trainer: "pl.Trainer") -> None:
        self.begin_step()
        if self.compares and self.strategy.meets_at_steps:
            with self._around_comparison():
                self._settings.before_step(trainer)

    def comparing_in(self, make: MakesContext) -> AbstractContextManager[None]:
        """Inside, such comparisons run in a context of another's: a replay leaves them out."""
        return setting(self, _around_comparison=make)

    def check_settings(self, trainer: "pl.Trainer") -> None:
        """Compare, around an epoch's end, what hooks and schedulers may change in a fit."""
        self.run.same_bits.begin_hooks(EPOCH_END)
        self._settings.are_due = True
        if trainer.state.fn == TrainerFn.FITTING and not self.strategy.meets_at_steps:
            self._settings.check(trainer)

    def _end_steps(self) -> None:
        """After the last step of a fit, before the hooks `on_train_end`."""
        self.begin_step()
        module = self.strategy.lightning_module
        if self.strategy.meets_at_steps and module is not None:
            self._settings.check(module.trainer)
        self.run.hooks.end_steps()


class RunSteps(RunPart):
    """Runs the module's steps, one for each batch, and counts what they hold and send."""

    _runner: StepRunner | None = None  # None before the engine is there
    _around: Sequence[MakesContext] = ()
    _has_begun = False
    _may_differ_in_batches = False  # of prediction
    _metrics: MetricGroups | None = None
    _same_batches: SameBatches | None = None

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.activations = KeptActivations()
        self.begin_fit()
        self.end()

    def begin_fit(self) -> None:
        """Count anew what steps send."""
        self._has_begun = False
        self.bytes = StepBytes(self.run.groups.sent_bytes, self.run.hooks.tally_of_codecs)

    def begin_run(self) -> None:
        """Compare the batches of ranks that share a model; each rank must call."""
        strategy, groups = self.strategy, self.run.groups
        if strategy.dimensions:
            model, device = groups.of_models.model, strategy.root_device
            self._metrics = MetricGroups(self.run.model, groups.samples.group)
            self._same_batches = SameBatches(model, groups.model_ranks, device)

    def run_by(
        self,
        runner: StepRunner,
        around: Sequence[MakesContext],
    ) -> None:
        """Let `runner` run the steps from now on, within these contexts, the first outermost."""
        self._runner, self._around = runner, around

    def run_step(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a step of the module's; each rank must call."""
        self.run.setup.follow_model()
        if kind == "training" or not self.run.is_fitting():  # each look is a message between stages
            self.strategy.engine.adoption.may_reformat = False
        assert self._runner is not None
        with self.memory.running(kind, args[0]), ExitStack() as around:
            for make in self._around:
                around.enter_context(make())
            step = self.memory.noting(step)
            if kind == "training":
                step = self.activations.around(step)
            return self.run.setup.completed(self._runner.run(kind, step, args, kwargs))

    def train(self, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a training step, whose bytes count; each rank must call."""
        if not self._has_begun and self.run.module.automatic_optimization:
            check_trainable(self.run.module)
        self._has_begun = True
        if self.run.same_bits.is_on:
            self.run.same_bits.begin_training_step()
        with self.bytes.counting():
            result = self.run_step("training", step, args, kwargs)
        if result is None and self.run.same_bits.is_on:
            raise self.run.same_bits.error(
                "training_step has returned no loss, expected that of each micro-batch, since "
                "every step adds up as many. Return a loss of 0 for what does not count."
            )
        return result

    def evaluate(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Begin a step that trains nothing, and run it; each rank must call."""
        self.run.loops.begin_step()
        if kind == "predict":
            self.strategy.predicted.note(*args)
        if self.run.same_bits.is_on:
            self.run.same_bits.begin_evaluation_step(args[1])
        return self.run_step(kind, step, args, kwargs)

    def update(self, optimizer: Optimizer, closure: Callable[[], Any], step: ModuleStep) -> Any:
        """Run an optimizer's step, in whose closure dimensions see its averaged gradients."""
        strategy = self.strategy
        is_own = self.run.module.automatic_optimization and not isinstance(closure, AbstractClosure)

        def seen() -> Any:
            # One of `optimizer_step` is a hook; of manual optimization it is a part of the step.
            with self.run.setup.in_hook() if is_own else having(asker, Asker.USER):
                result = closure()
            for one in strategy.dimensions:
                one.before_update(optimizer, strategy.optimizers.index(optimizer))
            self.run.same_bits.begin_hooks(UPDATE)
            return result

        with self.run.setup.hidden():
            self.run.setup.follow_model()  # before the optimizer runs, which may call the step
            with self.bytes.counting(), self.memory.told("optimizer_step"):
                result = step(optimizer, seen)
            if self.run.same_bits.is_on:
                self.run.same_bits.end_update()
            return result

    # --- batches ----------------------------------------------------------------------------------

    def prepared(self, loader: object) -> object:
        """Return a loader that gives ranks as many batches as the others; each rank must call."""
        strategy, groups = self.strategy, self.run.groups
        module = strategy.lightning_module
        is_predicting = module is not None and module.trainer.predicting
        if strategy.dimensions:
            if is_predicting:  # data-parallel ranks may have more batches than others
                loader = self._predicted_by_models(loader)
            seed_workers(loader, groups.samples.rank)  # alike on the ranks of one model
        sampler = getattr(loader, "sampler", None)
        if groups.seed is not None and isinstance(sampler, DistributedSampler):
            sampler.seed = groups.seed  # with another, ranks would draw from different orders
        ranks = strategy.collectives
        deals = self.run.same_bits.is_on and not strategy.assigns_samples
        if deals and module is not None and not is_predicting:
            dealing = self.run.same_bits.dealing()
            loader = dealing.dealt(loader, is_training=bool(module.trainer.training))
        lengths = lengths_on_ranks(loader, ranks)
        if is_predicting:  # Lightning gives each rank its own samples, none twice
            self._may_differ_in_batches |= len(set(lengths)) > 1 or None in lengths
            return loader
        is_training = module is None or bool(module.trainer.training)
        device = strategy.root_device
        return agree_on_batches(loader, lengths, ranks, device, is_training=is_training)

    def _predicted_by_models(self, loader: object) -> object:
        """Return a loader with as many batches as the ranks have that need each other's model."""
        groups = self.run.groups
        check_same_lengths(loader, groups.of_models.model)
        for axis in groups.sample_axes[1:]:  # what they have of the model is needed by all
            ranks = groups.of_models.along[axis]
            lengths = lengths_on_ranks(loader, ranks)
            loader = agree_on_batches(loader, lengths, ranks, self.strategy.root_device)
        return loader

    def compare_batch(self, batch: Any, loader: int) -> None:
        """Refuse a batch that other ranks of one model do not have; each must call."""
        module = self.strategy.lightning_module
        if self._same_batches is not None and module is not None:
            stage = module.trainer.state.stage
            assert stage is not None
            self._same_batches.check(batch, f"{stage.value} loader {loader}")

    def begin_predicting(self) -> PredictedBatches:
        """Note what this rank predicts, and hold parameters if others may have fewer batches."""
        if self._may_differ_in_batches:
            self.strategy.engine.hold_parameters()
        return PredictedBatches(self.run.module.trainer, self.strategy.data_collectives.rank)

    def end(self) -> None:
        """Forget what belongs to the run that ends."""
        self._runner = None
        self._may_differ_in_batches, self.memory = False, MemoryNotes(self.strategy)

    def end_comparing(self) -> None:
        """Give metrics their groups back."""
        if self._metrics is not None:
            self._metrics.restore()
        self._metrics = self._same_batches = None


# Checks that ranks take the same number of steps, before training or batch by batch.
#
# A rank that runs out of data while the others go on would leave them waiting for ever. Loaders
# that know their length are compared once; streams are asked before every batch.


def lengths_on_ranks(loader: Any, collectives: Collectives) -> list[int | None]:
    """Return each rank's number of batches, None for a stream. Each rank must call."""
    return collectives.all_gather_object(_length(loader))


def agree_on_batches(
    loader: Any,
    answers: list[int | None],
    collectives: Collectives,
    device: torch.device,
    *,
    is_training: bool = False,
) -> Any:
    """Compare a loader's lengths on the ranks, or wrap a stream so that ranks end together."""
    lengths = [length for length in answers if length is not None]
    if len(lengths) < len(answers):
        if collectives.size == 1:
            return loader
        return AgreedBatches(loader, collectives, device, is_training=is_training)
    if len(set(lengths)) > 1:
        shortest = lengths.index(min(lengths))
        raise ConfigError(
            f"Rank {collectives.rank}: the ranks have different numbers of batches, "
            f"{dict(enumerate(lengths))}; rank {shortest} has {lengths[shortest]}, expected the "
            f"same on all. Give every rank the same dataset and let the Trainer's sampler split "
            f"it, or drop the surplus in your own sampler."
        )
    return loader


def check_same_lengths(loader: Any, collectives: Collectives) -> None:
    """Raise unless ranks that share the work on each batch have the same number of them."""
    lengths = lengths_on_ranks(loader, collectives)
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Rank {collectives.rank} of its tensor-parallel group: the ranks that share every "
            f"layer have different numbers of batches, {dict(enumerate(lengths))}, expected the "
            f"same. Give them the same dataset and let the Trainer's sampler split it."
        )


def _length(loader: Any) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream
        return None


class AgreedBatches:
    """A loader of unknown length whose ranks agree before each batch that all have one."""

    def __init__(
        self,
        loader: Iterable[Any],
        collectives: Collectives,
        device: torch.device,
        *,
        is_training: bool = False,
    ) -> None:
        self._loader = loader
        self._collectives = collectives
        self._device = device
        self._is_training = is_training

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        index = -1
        for index, batch in enumerate(self._loader):
            self._agree(index, has_batch=True)
            yield batch
        self._agree(index=None, has_batch=False)
        if index < 0 and self._is_training:
            rank_zero_warn(
                "The stream of data yielded no batch on any rank, so that this epoch trains "
                "nothing. Is it exhausted, or its source empty?"
            )

    def _agree(self, index: int | None, *, has_batch: bool) -> None:
        counts = torch.tensor([int(has_batch)], device=self._device)
        self._collectives.all_reduce(counts).wait()
        total = int(counts)
        if total not in (0, self._collectives.size):
            mine = f"has batch {index}" if has_batch else "has run out of data"
            raise ConfigError(
                f"Rank {self._collectives.rank} {mine}, but only {total} of "
                f"{self._collectives.size} ranks have one more batch. Every rank must yield the "
                f"same number: shard the stream by rank and cut it to equal lengths."
            )
