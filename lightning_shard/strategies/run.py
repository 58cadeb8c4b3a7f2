"""The run of a strategy: what its parts share, and the parts, each of one idea.

    groups         this rank's place in the mesh, and its groups      groups.py
    termination    what a signal to any rank ends                     trainer/termination.py
    loops          what the Trainer's loops do besides                run_steps.py
    setup          the engine, and what works on it                   engine_setup.py
    steps          the module's steps, their memory and bytes         run_steps.py
    same_bits      micro-batches whose sums have one order            same_bits.py
    checkpoints    saving and loading                                 checkpoints.py
    end            what a fit leaves on its ranks                     fit_ends.py
    hooks          what the scheme does besides                       parts.py

Lightning calls the strategy (`data_parallel.py`), which says in one place in which order the parts
do what a hook of Lightning's asks for.

Saving of a failed run's state, while its callbacks hear of the error.

    all ranks have raised at the same place   they save together, as ever
    a signal has stopped all of them          so they do, and once if nobody asks: see below
    each rank has the full state              the first that is left saves it, and asks nobody
    other ranks have parts of the state       an error says why there is no file

A rank that has failed alone would wait in `trainer.save_checkpoint` for peers that are somewhere
else, or write its part of the state to a file that looks full.

When a signal ends a fit its state is saved once, for the job that goes on:

    SIGTERM            `last-sigterm.ckpt` beside the files of the first `ModelCheckpoint`, unless a
                       callback saves on the exception; `ckpt_path="last"` finds the newest
    SLURM's requeue    `hpc_ckpt_N.ckpt` in the trainer's default folder, before callbacks save
                       theirs; it gets its name when it is complete, since Lightning counts
                       everything that has `hpc_ckpt_` in its name. Then rank 0 has the job requeued
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.files.places import local_path
from lightning_shard.checkpoint.run_folders import CheckpointedRun
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.environments.launchers.failures import noted
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.checkpoints import Checkpoints
from lightning_shard.strategies.dimensions.pipeline import PipelineDimension
from lightning_shard.strategies.engine_setup import EngineSetup
from lightning_shard.strategies.fit_ends import FitEnd
from lightning_shard.strategies.groups import MeshGroups
from lightning_shard.strategies.options import DataParallelOptions
from lightning_shard.strategies.parts import RunPart, SchemeHooks
from lightning_shard.strategies.run_steps import RunLoops, RunSteps
from lightning_shard.strategies.same_bits import SameBits
from lightning_shard.strategies.trainer._lightning import requeue, requeue_path
from lightning_shard.strategies.trainer.termination import RunTermination


def _has_trained(trainer: "pl.Trainer") -> bool:
    """Whether there is something to go on from that was not there before."""
    is_fit = trainer.state.fn == TrainerFn.FITTING
    return is_fit and trainer.global_step > 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _place(trainer: "pl.Trainer") -> str:
    """Return where to save on SIGTERM; "" where nothing is to be saved."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and _saves(callback):
            name = f"{callback.CHECKPOINT_NAME_LAST}-sigterm{callback.FILE_EXTENSION}"
            return os.path.join(callback.dirpath, name) if _has_trained(trainer) else ""
    return ""


def _saves(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 or bool(callback.save_last)


def _have_requeued(strategy: Any, trainer: "pl.Trainer") -> None:
    path, save_checkpoint = strategy.broadcast(requeue_path(trainer)), trainer.save_checkpoint
    folder, name = os.path.split(path)
    is_remote = local_path(path) is None  # where it counts when all of it has arrived
    written = path if is_remote else os.path.join(folder, name.replace("hpc_ckpt_", "requeue-"))

    def save() -> None:
        if not _has_trained(trainer):
            return
        save_checkpoint(written)
        strategy.finish_save()
        strategy.checkpoint_io.teardown()  # of Lightning's asynchronous one: waits for it
        strategy.barrier()
        if strategy.is_global_zero and not is_remote:
            os.replace(written, path)
        strategy.barrier()

    requeue(trainer, save)


class Run:
    """The runs of one strategy on one rank; there is an engine from `setup` to `teardown`."""

    def __init__(self, strategy: Any, options: DataParallelOptions) -> None:
        self.strategy = strategy
        self.options: EngineOptions = options.engine_options(strategy.stage)
        self.announces = options.announce
        self.engine: DataParallelEngine | None = None
        self.hooks = SchemeHooks(self)
        self.groups = MeshGroups(self)
        self.termination = RunTermination(saves=options.save_on_sigterm)
        self.loops = RunLoops(self)
        self.setup = EngineSetup(self, options.reduce_dtype)
        self.steps = RunSteps(self)
        self.same_bits = SameBits(self)
        self.checkpoints = Checkpoints(self)
        self.end = FitEnd(self, options.full_parameters_after_fit)
        self._last_meeting: Collectives | None = None  # where all ranks end in common

    def of(self, strategy: Any) -> Self:
        """Return a copy for a copy of the strategy, which is asked and does not run."""
        made = copy.copy(self)
        made.strategy = strategy
        for name, part in vars(self).items():
            if isinstance(part, RunPart):
                copied = copy.copy(part)
                copied.run = made
                setattr(made, name, copied)
        return made

    def become(self, chosen: "Run") -> None:
        """Take over what another strategy's options decide, before there are groups."""
        self.options, self.hooks = chosen.options, SchemeHooks(self)

    @property
    def module(self) -> "pl.LightningModule":
        """The user's module; there from the beginning of a run."""
        module: pl.LightningModule | None = self.strategy.lightning_module
        assert module is not None
        return module

    @property
    def model(self) -> nn.Module:
        """What the strategy trains of it; there from the set-up of a run."""
        model: nn.Module | None = self.strategy.model
        assert model is not None
        return model

    @property
    def trainer(self) -> "pl.Trainer | None":
        """The module's trainer; None before it has one."""
        module = self.strategy.lightning_module
        with suppress(RuntimeError, AttributeError):  # Lightning's, and that of a deleted one
            return None if module is None else module.trainer
        return None

    @property
    def is_in_fit(self) -> bool:
        """Whether the trainer fits, or has done so last."""
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def is_fitting(self) -> bool:
        """Whether a fit runs."""
        return self.is_in_fit and self.end.at_rest is None  # the trainer names its last run

    @property
    def checkpointed(self) -> CheckpointedRun:
        """What is saved and loaded of this run, as it is now."""
        strategy = self.strategy
        return CheckpointedRun(
            module=strategy.lightning_module,
            optimizers=strategy.optimizers,
            mesh=strategy.mesh,
            rank=strategy.mesh_rank,
            device=strategy.root_device,
            ranks=self.groups.present,
            engine=self.engine,
            is_in_process=strategy.is_in_process,
            is_folder=strategy.checkpoint_format == "sharded",
            dimensions=strategy.dimensions,
            kept_besides=self.hooks.kept_besides,
        )

    @property
    def holds_shards(self) -> bool:
        """Whether this rank's state is less than a single device's."""
        return self.options.stage > 0 or self.groups.splits_model

    @property
    def has_full_parameters(self) -> bool:
        """Whether each rank has full parameters between the steps."""
        return self.options.stage < 3 and not self.groups.splits_model

    @property
    def stages(self) -> PipelineDimension:
        """The dimension whose ranks have stages of the model."""
        for one in self.strategy.dimensions:
            if isinstance(one, PipelineDimension):
                return one
        raise ConfigError(
            f"{type(self.strategy).__name__} has no pipeline, expected a strategy whose ranks have "
            f"stages. Use strategy='pipeline_parallel' or 'hybrid_parallel'."
        )

    # --- a run that has failed, see `Salvages` ----------------------------------------------------

    @property
    def has_shut_down_together(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""
        return self.termination.has_stopped_all

    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Make the context in which callbacks hear of an exception and may save checkpoints."""
        if is_common and self.has_shut_down_together:
            self.termination.settle(self.strategy)
        self.checkpoints.saves.end(error, is_common=is_common)
        if is_common and self.groups.present is not None:
            return self._saving_together(error if self.has_shut_down_together else None)
        if self.checkpoints.has_all:
            left = (rank for rank in range(self.strategy.mesh_size) if rank not in gone)
            return self._saving_alone(writes=self.strategy.mesh_rank == next(left, 0))
        return self._saving_nothing(
            f"the ranks have stopped at different places, this one with {type(error).__name__}, "
            f"and each has a part of the state only"
        )

    @contextmanager
    def _saving_together(self, signalled: BaseException | None) -> Iterator[None]:
        """Let all ranks save inside, and once if nobody asks where a signal has stopped them."""
        steps = self.groups.all_ranks.all_gather_object(self.module.trainer.global_step)
        apart = f"the ranks have raised after different numbers of steps, {steps}"
        once = nullcontext() if signalled is None else self._saving_once(signalled)
        with nullcontext() if len(set(steps)) == 1 else self._saving_nothing(apart), once:
            yield

    @contextmanager
    def _saving_alone(self, *, writes: bool) -> Iterator[None]:
        """Let a rank that has the full state save it by itself, if it is the one that writes."""
        apart = nullcontext() if self.engine is None else self.engine.asking_nobody()
        with setting(self.checkpoints, writes_alone=writes), self.groups.asking_nobody(), apart:
            yield

    def _saving_nothing(self, reason: str) -> AbstractContextManager[None]:
        """Raise an error that says why there is none when code asks for a state inside."""
        return setting(self.checkpoints, refusal=reason)

    @contextmanager
    def _saving_once(self, error: BaseException) -> Iterator[None]:
        """Save a fit that a signal has ended, unless callbacks do so inside; each must call."""
        trainer, before = self.module.trainer, self.checkpoints.num_fits
        if self.termination.requeues:
            with noted(error, "having SLURM requeue the job"):
                _have_requeued(self.strategy, trainer)
        yield
        place, is_saved = _place(trainer), self.checkpoints.num_fits > before
        saves = self.termination.saves_on_sigterm and place
        if saves and self.strategy.reduce_boolean_decision(not is_saved):
            trainer.save_checkpoint(place)
            rank_zero_info(
                f"The run was sent SIGTERM after step {trainer.global_step}, and its state is "
                f"saved in {place}. Go on from it with trainer.fit(..., ckpt_path='last')."
            )

    def end_in_common(self) -> None:
        """Tear down, full if possible, after an exception of all ranks, each of which must call."""
        with setting(self, _last_meeting=self.groups.everybody):
            self.strategy.teardown()
            self.meet_last()

    def meet_last(self) -> None:
        """Where all end in common, wait for the others: a rank that raises ends their waits."""
        meeting, self._last_meeting = self._last_meeting, None
        if meeting is not None:
            meeting.barrier()
