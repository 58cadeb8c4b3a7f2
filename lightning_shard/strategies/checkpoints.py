"""Saving and loading of a run: one file, brought together from the ranks' shards, or a folder."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shard.checkpoint import run_folders
from lightning_shard.checkpoint.background_saves import BackgroundSaves
from lightning_shard.checkpoint.files.places import is_folder
from lightning_shard.checkpoint.full import (
    MappedParameters,
    full_module_state,
    join_shards,
    load_module_state,
)
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.checkpoint.resuming import (
    Resuming,
    agree_on_misfit,
    error_of,
    failing_together,
    run_misfits,
)
from lightning_shard.checkpoint.section import (
    leave_out_frozen,
    left_out_of,
    section_of,
    writable_section,
)
from lightning_shard.checkpoint.sharded.entries import checkpoint_of
from lightning_shard.checkpoint.sharded.folder import StoredFolder, verify_whole
from lightning_shard.checkpoint.sharded.run_state import (
    loads_plainly,
    module_boxes,
    optimizer_boxes,
)
from lightning_shard.checkpoint.streamed import StreamedFile, StreamedState
from lightning_shard.core.extensions import instead
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.inner_tensors import inner_entries
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.checkpoint_files import CheckpointFiles, check_folder_writer
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer._lightning import knowing_saves_in_flight
from lightning_shard.strategies.trainer.hook_advice import may_see_checkpoints, may_see_loaded
from lightning_shard.strategies.trainer.place_in_data import KeptState


class Checkpoints(RunPart):
    """Saves and loads checkpoints, during a run from the engine's shards.

    Attributes:
        left_sharded: Whether a failed run has left shards: there is nothing whole to save.
        refusal: Why nothing can be saved; "" if it can be.
        writes_alone: Whether this rank writes what it saves without the others; None where all save
            together.
    """

    resuming: Resuming | None = None
    left_sharded = False
    refusal = ""
    writes_alone: bool | None = None
    num_fits = 0
    _may_stream: bool | None = None  # in the middle of a save, as far as this rank can see
    _streamed: StreamedState | None = None  # in the middle of a save
    _file: StreamedFile | None = None  # in the middle of a save of a file that is ours
    _mapped: Mapping[str, Any] | None = None  # weights of the file that was loaded last, if it is
    _lent: MappedParameters | None = None  # what parameters show of it, until there is an engine

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.saves = BackgroundSaves()
        self.folders = run_folders.RunFolders(self.saves)
        self.kept = KeptState()

    # --- saving -----------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Save Lightning's checkpoint; each rank must call unless one has everything."""
        if self.writes_alone is not None:
            if self.writes_alone:
                self._write_alone(checkpoint, filepath, storage_options)
            return
        is_fit = "optimizer_states" in checkpoint
        if is_fit and (own := self.run.hooks.section()):
            writable_section(checkpoint).update(own)
        self._leave_out_frozen(checkpoint)
        if self.run.engine is not None and self.run.options.stage == 3:
            join_shards(checkpoint, self.run.engine)
        file, is_fitting = self._file_to_write(), self.run.is_fitting()
        if is_fit and (
            entries := self.kept.entries(self.run.checkpointed, file, is_fitting=is_fitting)
        ):
            writable_section(checkpoint).update(entries)
        try:
            with failing_together(self.run.groups.present):
                self._save(checkpoint, filepath, storage_options, file)
        except BaseException:
            self.saves.drop_copy()
            raise
        finally:
            self._file = None
        self.saves.start()
        self.num_fits += is_fit

    def _file_to_write(self) -> StreamedFile | None:
        """Return the file that is saved, where nobody but its writer sees tensors; None if not."""
        if self.strategy.checkpoint_format == "sharded" or not self._is_ours:
            return None
        self._file = self._file or StreamedFile()
        return self._file

    @property
    def _is_ours(self) -> bool:
        """Whether files are written by this package's own `CheckpointIO`."""
        return type(self.strategy.checkpoint_io) is CheckpointFiles

    def _leave_out_frozen(self, checkpoint: dict[str, Any]) -> None:
        module = self.strategy.lightning_module
        if self.strategy.save_trainable_only and module is not None:
            leave_out_frozen(checkpoint, module)

    def _write_alone(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of which this rank has everything; no other rank is asked."""
        self._leave_out_frozen(checkpoint)
        if self.strategy.checkpoint_format == "sharded":
            self._save_folder(checkpoint, filepath, alone=True)
        else:
            files = self.strategy.checkpoint_io
            files.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _save(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
        file: StreamedFile | None,
    ) -> None:
        """Write a checkpoint on rank 0; each rank must call."""
        files, is_first = self.strategy.checkpoint_io, self.strategy.is_global_zero
        if self.strategy.checkpoint_format == "sharded":
            check_folder_writer(files, storage_options, ())
            self._save_folder(checkpoint, filepath, alone=False)
        elif file is None:
            if is_first:
                files.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:
            with self.run.setup.hidden():
                files.save_streamed(checkpoint, file, filepath, storage_options, writes=is_first)

    def _save_folder(self, checkpoint: Mapping[str, Any], filepath: Any, *, alone: bool) -> None:
        """Write a folder; each rank must call unless one has everything and is alone."""
        module, step = self.strategy.lightning_module, None
        if not alone and self.run.engine is not None and module is not None:
            is_running = module.trainer.state.status == TrainerStatus.RUNNING
            step = module.trainer.global_step if is_running else None
        scheme = strategy_name(self.strategy)
        self.folders.save(
            self.run.checkpointed, checkpoint, filepath, scheme=scheme, alone=alone, step=step
        )

    def remove(self, filepath: Any) -> None:
        """Remove a checkpoint, once a save that is still written is complete."""
        files = self.strategy.checkpoint_io
        waits = self.saves.remove_later(filepath, files.remove_checkpoint)
        if not waits and self.strategy.is_global_zero:
            files.remove_checkpoint(filepath)

    def follow_data(self, trainer: "pl.Trainer") -> None:
        """Note the place in the data of the fit that begins, and go on from one that is loaded."""
        if not self.strategy.assigns_samples:
            following = self.kept.following(self.run.checkpointed, trainer)
            self.run.loops.in_run.enter_context(following)

    def begin_training(self) -> None:
        """Let saves go on in the background, and callbacks know of them; each rank must call."""
        if not self.strategy.async_save:
            return
        trainer = self.run.module.trainer
        shows = trainer.progress_bar_callback is not None and self.strategy.is_global_zero
        self.saves.open(self.strategy.root_device, shows_progress=shows)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self.run.loops.in_run.enter_context(
                    knowing_saves_in_flight(
                        callback, self.saves.will_exist, self.saves.once_complete
                    )
                )

    def end_training(self) -> None:
        """Wait for the saves in flight; each rank must call."""
        self.saves.close()
        self.saves.finish()

    def take_over_lent(self) -> None:
        """Let no parameter show a file any more."""
        if self._lent is not None:
            self._lent.take_over()
        self._lent = self._mapped = None

    def tear_down(self) -> None:
        """Forget what belongs to the run that ends."""
        for part in (self.saves, self.folders, self.kept):
            part.tear_down()
        self.take_over_lent()
        self.resuming = None

    def saving_in_run(
        self, trainer: "pl.Trainer", around: MakesContext
    ) -> AbstractContextManager[None]:
        """Let the trainer save inside; a file's state comes only when it is written."""

        def save_checkpoint(save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            with around():
                self._may_stream = self._nobody_looks(trainer)
                try:
                    save(*args, **kwargs)
                finally:
                    self._streamed = self._file = self._may_stream = None

        return instead(trainer, "save_checkpoint", save_checkpoint)

    def _nobody_looks(self, trainer: "pl.Trainer") -> bool:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        is_seen = may_see_checkpoints(trainer.lightning_module, callbacks)
        saves_alone = self.run.groups.present is None
        return self.strategy.saves_shards and self._is_ours and not is_seen and not saves_alone

    # --- states -----------------------------------------------------------------------------------

    @property
    def _saves_boxes(self) -> bool:
        """Whether states in shards are asked for as boxes."""
        return bool(self.strategy.checkpoint_format == "sharded" and self.strategy.saves_shards)

    def check_saves(self) -> None:
        """Raise CheckpointError where nothing can be saved."""
        if self.refusal:
            raise CheckpointError(
                f"Rank {self.strategy.mesh_rank}: nothing is saved on this exception, since "
                f"{self.refusal}. Go on from the last checkpoint; one that is saved every few "
                f"hundred steps (ModelCheckpoint(every_n_train_steps=...)) costs little."
            )

    def module_state(self) -> dict[str, Any]:
        """Return the module's state to save; each rank must call."""
        module, engine = self.run.module, self.run.engine
        if engine is None:  # after teardown everything is full again
            self._check_full()
            state: dict[str, Any] = module.state_dict()
            return state
        if self._saves_boxes:
            return module_boxes(module, engine)
        streamed = self._stream(engine)
        if streamed is not None:
            return streamed.module_state(module)
        return full_module_state(module, engine)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state to save; each rank must call."""
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        engine = self.run.engine or self.run.end.cut_states
        if engine is None:
            self._check_full()
            return raw.state_dict() if self.strategy.is_global_zero else {}
        if self._saves_boxes:
            return optimizer_boxes(raw, run_folders.names_of(self.run.checkpointed), engine)
        streamed = self._stream(engine)
        return full_state_dict(raw, engine) if streamed is None else streamed.optimizer_state(raw)

    def _stream(self, engine: DataParallelEngine) -> StreamedState | None:
        """Return what is streamed in this save; None if somebody looks. Each rank must call."""
        if self._streamed is not None or self._may_stream is None:
            return self._streamed
        # a callback may be on one rank only
        decide = self.strategy.reduce_boolean_decision
        if decide(self._may_stream) and (file := self._file_to_write()):
            with_frozen = not self.strategy.save_trainable_only
            self._streamed = StreamedState(engine, file, with_frozen=with_frozen)
        return self._streamed

    def _check_full(self) -> None:
        if self.left_sharded:
            raise CheckpointError(
                f"Rank {self.strategy.mesh_rank}: the last run failed and left shards of its state "
                f"on the ranks, expected full tensors to save. Resume from an earlier checkpoint."
            )

    @property
    def has_all(self) -> bool:
        """Whether this rank alone has the full state, to save it without asking the others."""
        run, engine = self.run, self.run.engine
        if engine is None:
            return not self.left_sharded
        shares = run.holds_shards or not isinstance(engine.split, Unsplit)
        return run.hooks.may_have_all and not (shares or run.options.compression is not None)

    # --- loading ----------------------------------------------------------------------------------

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Return a checkpoint for a run; each rank must call."""
        if self.strategy.is_in_process:  # Lightning holds a lock of the process; all see one file
            return self._load_any(path, weights_only)
        with failing_together(self.run.groups.present):
            return self._load_any(path, weights_only)

    def read_alone(self, path: Any) -> Mapping[str, Any]:
        """Return a checkpoint that this rank reads by itself, in a run or not."""
        if is_folder(path):
            verify_whole(path)  # all of it, which a share of the ranks' would read once more
            return checkpoint_of(StoredFolder(path), in_full=self._others_see_loaded())
        found: Mapping[str, Any] = self.strategy.checkpoint_io.load_checkpoint(path)
        return found

    def _load_any(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        if is_folder(path):
            return self._load_folder(path, weights_only)
        files = self.strategy.checkpoint_io
        if self._is_ours and not self._others_see_loaded():
            together = None if self.strategy.is_in_process else self.run.groups.present
            rank = self.strategy.mesh_rank
            checkpoint = files.load_mapped(path, weights_only, self.run.module, together, rank)
            self._mapped = checkpoint.get("state_dict")
        else:
            torch.cuda.empty_cache()  # as Lightning does
            checkpoint = files.load_checkpoint(path, weights_only=weights_only)
        found: dict[str, Any] = checkpoint
        return found

    def _load_folder(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint = run_folders.load_folder(
            self.run.checkpointed, path, weights_only, in_full=self._others_see_loaded()
        )
        if self.run.is_fitting() and "loops" not in checkpoint:
            rank_zero_warn(
                f"{path} holds weights and optimizers' states, and nothing of a Trainer's: the fit "
                f"begins with them at its first epoch and step, with schedules at their beginning."
            )
        return checkpoint

    def _others_see_loaded(self) -> bool:
        """Whether somebody but us looks at what is loaded."""
        module, trainer = self.strategy.lightning_module, self.run.trainer
        runs = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if module is None or trainer is None or not runs or self.run.engine is not None:
            return True
        return not loads_plainly(module) or may_see_loaded(module, trainer.callbacks)

    def load_module(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load a checkpoint's weights; each rank must call."""
        run, module = self.run, self.run.module
        engine, is_fitting = run.engine, run.is_fitting()
        if is_fitting:
            section_of(checkpoint)  # raises for a newer format, before anything is loaded
        left_out = left_out_of(checkpoint)
        state = inner_entries(module, checkpoint["state_dict"])
        averages = is_fitting and engine is None
        if run_folders.is_stored(state):
            before = self.folders.take_weights(
                run.checkpointed, state, strict=strict, left_out=left_out
            )
        else:
            if engine is None and self._mapped is not None and state is self._mapped:
                self._lent = MappedParameters(module, self._mapped)
            before = load_module_state(
                module,
                state,
                strict=strict,
                left_out=left_out,
                engine=engine,
                agree=partial(agree_on_misfit, run.groups.present),
                paired=checkpoint.get("current_model_state") if averages else None,  # of averages
                lent=self._lent,
            )
        if engine is None and "optimizer_states" in checkpoint and is_fitting:
            self.resuming = Resuming(checkpoint, before, self._lent)
        elif self._lent is not None:
            self._lent.forget_own()

    def check_resuming(self, *, may_change: bool) -> None:
        """Refuse a checkpoint that a fit could not go on from, before it holds any of it."""
        if self.resuming is not None:
            ranks, made = self.strategy.collectives, self.strategy.optimizers
            self.resuming.check(self._misfits, ranks, made, may_change=may_change)

    def load_optimizers(self, checkpoint: Any) -> bool:
        """Load the optimizers' states into shards, or return False; each rank must call."""
        optimizers = self.strategy.optimizers
        if self.resuming is None or not self.resuming.has_checked(optimizers):
            error = error_of(self._misfits(checkpoint), "only its weights were")
            agree_on_misfit(self.run.groups.present, error)
        self.resuming = None
        if self.run.engine is None:  # after teardown everything is full again
            self._check_full()
            return False
        self.kept.load(self.run.checkpointed, checkpoint)
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            local = run_folders.local_state(self.run.checkpointed, state, optimizer)
            with self.run.engine.optimizer_view():
                optimizer.load_state_dict(local)
        return True

    def _misfits(self, checkpoint: Mapping[str, Any]) -> list[str]:
        states, optimizers = checkpoint["optimizer_states"], self.strategy.optimizers
        if states is None:  # they are checked later
            states, optimizers, misfits = [], [], list[str]()
        else:
            states, misfits = run_folders.checked_names(self.run.checkpointed, states)
        return misfits or run_misfits(
            {**checkpoint, "optimizer_states": states},
            self.run.module,
            optimizers,
            kept=section_of(checkpoint),
            scaler=getattr(self.strategy.precision_plugin, "scaler", None),
            scaler_state=checkpoint.get(MixedPrecision.__qualname__),
            engine=self.run.engine,
        )
