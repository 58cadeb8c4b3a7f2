"""Lightning's hooks of saving and loading, which go to the objects that do it.

    `_folders`    a `RunFolders`: checkpoints as folders, and back
    `_saves`      `BackgroundSaves`: those that are written while the fit goes on
    `_kept`       a `KeptState`: what each rank keeps beside Lightning's and torch's entries
    `salvage`     what is saved of a run that fails

What is here is a full checkpoint, brought together from the ranks' shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Self
from unittest.mock import patch

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
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
from lightning_shard.checkpoint.run_folders import (
    RunFolders,
    checked_names,
    is_stored,
    load_folder,
    local_state,
    names_of,
)
from lightning_shard.checkpoint.section import (
    leave_out_frozen,
    left_out_of,
    section_of,
    writable_section,
)
from lightning_shard.checkpoint.sharded.entries import checkpoint_of
from lightning_shard.checkpoint.sharded.folder import StoredFolder
from lightning_shard.checkpoint.sharded.run_state import (
    loads_plainly,
    module_boxes,
    optimizer_boxes,
)
from lightning_shard.checkpoint.sharded.writing import verify_whole
from lightning_shard.checkpoint.streamed import StreamedFile, StreamedState
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.deferred_init.recorder import noting_changes
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from lightning_shard.strategies.dimensions.dimension import ParallelDimension
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.salvage import salvaging
from lightning_shard.strategies.trainer._lightning import knowing_saves_in_flight
from lightning_shard.strategies.trainer.hook_advice import (
    explaining_weights_elsewhere,
    may_see_checkpoints,
    may_see_loaded,
)
from lightning_shard.strategies.trainer.place_in_data import KeptState


class CheckpointingStrategy(ShardStrategy):
    """Saves and loads checkpoints, during a run from the engine's shards.

    Attributes:
        dimensions: How ranks share one model; the first splits it first.
        saves_shards: Whether shards stay as they are while a file is written.
    """

    dimensions: Sequence[ParallelDimension] = ()
    saves_shards: ClassVar[bool] = True
    _engine: DataParallelEngine | None = None
    _cut_states: DataParallelEngine | None = None  # of optimizers, beside a module that is full
    _options: EngineOptions
    _may_stream: bool | None = None  # in the middle of a save, as far as this rank can see
    _streamed: StreamedState | None = None  # in the middle of a save
    _file: StreamedFile | None = None  # in the middle of a save of a file that is ours
    _left_sharded = False  # by a failed run: there is nothing whole to save
    _resuming: Resuming | None = None  # until everything is known to fit
    _mapped: Mapping[str, Any] | None = None  # weights of the file that was loaded last, if it is
    _lent: MappedParameters | None = None  # what parameters show of it, until there is an engine

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._saves = BackgroundSaves()
        self._folders = RunFolders(self._saves)
        self._kept = KeptState()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for another rank or Trainer; inside of a run itself, which is there once.

        A progress bar that user code copies in a hook holds its trainer, and that its strategy.
        """
        trainer = self._own_trainer
        is_running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if is_running and (current_world() is not None or not self.is_in_process):
            return self  # before there is a world, ranks are copied
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(deepcopy(self.__getstate__(), memo))
        return made

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of this run's ranks; here all are given different samples."""
        return ParallelMesh(dp=self.mesh_size)

    @property
    def engine(self) -> DataParallelEngine:
        """The engine; there from `setup` to `teardown`."""
        if self._engine is None:
            raise ConfigError("There is no engine before the strategy's setup or after teardown.")
        return self._engine

    @property
    def present_engine(self) -> DataParallelEngine | None:
        """The engine; None before the strategy's setup and after teardown."""
        return self._engine

    @property
    def present_collectives(self) -> Collectives | None:
        """The group of all ranks; None where this rank asks nobody."""
        return self._collectives if dist.is_initialized() else None

    @property
    def _holds_shards(self) -> bool:
        """Whether this rank's state is less than a single device's."""
        return self._options.stage > 0

    def _is_fitting(self) -> bool:
        """Whether a fit runs."""
        trainer = self._own_trainer
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    @property
    def _own_trainer(self) -> "pl.Trainer | None":
        """The module's trainer; None before it has one."""
        with suppress(RuntimeError, AttributeError):  # Lightning's, and that of a deleted one
            return None if self.lightning_module is None else self.lightning_module.trainer
        return None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self._leave_out_frozen(checkpoint)
        if self._engine is not None and self._options.stage == 3:
            join_shards(checkpoint, self._engine)
        file = self._file_to_write()
        if "optimizer_states" in checkpoint and (
            entries := self._kept.entries(self, file, is_fitting=self._is_fitting())
        ):
            writable_section(checkpoint).update(entries)
        try:
            with failing_together(self.present_collectives):
                self._save(checkpoint, filepath, storage_options, file)
        except BaseException:
            self._saves.drop_copy()
            raise
        finally:
            self._file = None
        self._saves.start()

    def _file_to_write(self) -> StreamedFile | None:
        """Return the file that is saved, where nobody but its writer sees tensors; None if not."""
        if self.checkpoint_format == "sharded" or type(self.checkpoint_io) is not CheckpointFiles:
            return None
        self._file = self._file or StreamedFile()
        return self._file

    def _leave_out_frozen(self, checkpoint: dict[str, Any]) -> None:
        if self.save_trainable_only and self.lightning_module is not None:
            leave_out_frozen(checkpoint, self.lightning_module)

    def write_alone(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of which this rank has everything; no other rank is asked."""
        self._leave_out_frozen(checkpoint)
        if self.checkpoint_format == "sharded":
            self._save_folder(checkpoint, filepath, alone=True)
        else:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    def _save(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
        file: StreamedFile | None,
    ) -> None:
        """Write a checkpoint on rank 0; each rank must call."""
        if self.checkpoint_format == "sharded":
            self._check_writer(storage_options)
            self._save_folder(checkpoint, filepath, alone=False)
            return
        files = self.checkpoint_io
        if file is None or not isinstance(files, CheckpointFiles):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._seeing_shards():
            try:
                if self.is_global_zero:
                    files.save_records(file.records(checkpoint), filepath, storage_options)
            finally:
                file.finish()

    def _check_writer(self, storage_options: Any) -> None:
        """Refuse what a folder would pass over.

        Raises:
            ConfigError: A `CheckpointIO` of the user's, or options for it.
        """
        plugin = type(self.checkpoint_io).__name__
        if storage_options is not None or not isinstance(self.checkpoint_io, CheckpointFiles):
            raise ConfigError(
                f"checkpoint_format='sharded' lets each rank write its part of a folder, without a "
                f"CheckpointIO, got {plugin} and storage_options={storage_options!r}, expected "
                f"neither. Leave them out, or use checkpoint_format='full'."
            )

    def _save_folder(self, checkpoint: Mapping[str, Any], filepath: Any, *, alone: bool) -> None:
        """Write a folder; each rank must call unless one has everything and is alone."""
        module, step = self.lightning_module, None
        if not alone and self._engine is not None and module is not None:
            is_running = module.trainer.state.status == TrainerStatus.RUNNING
            step = module.trainer.global_step if is_running else None
        scheme = strategy_name(self)
        self._folders.save(self, checkpoint, filepath, scheme=scheme, alone=alone, step=step)

    def finish_save(self) -> None:
        """Wait until the save in flight is complete, if there is one; each rank must call.

        Raises:
            CheckpointError: It has failed on some rank.
        """
        self._saves.finish()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self._saves.remove_later(filepath, self.checkpoint_io.remove_checkpoint):
            super().remove_checkpoint(filepath)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if not self.async_save:
            return
        trainer = self.run_module.trainer
        shows = trainer.progress_bar_callback is not None and self.is_global_zero
        self._saves.open(self.root_device, shows_progress=shows)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._in_run.enter_context(
                    knowing_saves_in_flight(
                        callback, self._saves.will_exist, self._saves.once_complete
                    )
                )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.meets_at_steps:
            self._saves.advance()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._saves.close()
        self._saves.finish()

    @override
    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        self._saves.end(error, is_common=is_common)
        return salvaging(self, error, is_common=is_common, gone=gone, has_all=self._has_all)

    def _take_over_lent(self) -> None:
        """Let no parameter show a file any more."""
        if self._lent is not None:
            self._lent.take_over()
        self._lent = self._mapped = None

    @override
    def teardown(self) -> None:
        for part in (self._saves, self._folders, self._kept):
            part.tear_down()
        self._take_over_lent()
        self._resuming = None
        super().teardown()

    def _follow_data(self, trainer: "pl.Trainer") -> None:
        """Note the place in the data of the fit that begins, and go on from one that is loaded."""
        if not self.assigns_samples:
            self._in_run.enter_context(self._kept.following(self, trainer))

    def kept_besides(self) -> Mapping[str, Any]:
        """Return what this rank keeps in this scheme alone; no communication, and no copies."""
        return {}

    @override
    def _begin_run(self, trainer: "pl.Trainer") -> None:
        super()._begin_run(trainer)
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._streaming(trainer), explaining_weights_elsewhere(self.mesh_rank):
                save(*args, **kwargs)

        self._in_run.enter_context(patch.object(trainer, "save_checkpoint", save_checkpoint))

    @contextmanager
    def _streaming(self, trainer: "pl.Trainer") -> Iterator[None]:
        """Inside, the state that the strategy is asked for comes when it is written.

        That is where nobody but the file's writer can look at it.
        """
        self._may_stream = self._nobody_looks(trainer)
        try:
            yield
        finally:
            self._streamed = self._file = self._may_stream = None

    def _nobody_looks(self, trainer: "pl.Trainer") -> bool:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        is_seen = may_see_checkpoints(trainer.lightning_module, callbacks)
        saves_alone = self.present_collectives is None
        is_ours = type(self.checkpoint_io) is CheckpointFiles
        return self.saves_shards and is_ours and not is_seen and not saves_alone

    def _seeing_shards(self) -> AbstractContextManager[None]:
        """Inside, weights are the shards that are here, also within a hook."""
        return nullcontext()

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self.is_in_process:  # Lightning holds a lock of the process; all see the same file
            return self._load_any(checkpoint_path, weights_only)
        with failing_together(self.present_collectives):
            return self._load_any(checkpoint_path, weights_only)

    def read_alone(self, path: Any) -> Mapping[str, Any]:
        """Return a checkpoint that this rank reads by itself, in a run or not.

        Raises:
            CheckpointError: It is damaged, or not complete.
        """
        if is_folder(path):
            verify_whole(path)  # all of it, which a share of the ranks' would read once more
            return checkpoint_of(StoredFolder(path), in_full=self._others_see_loaded())
        return self.checkpoint_io.load_checkpoint(path)

    def _load_folder(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint = load_folder(self, path, weights_only, in_full=self._others_see_loaded())
        if self._is_fitting() and "loops" not in checkpoint:
            rank_zero_warn(
                f"{path} holds weights and optimizers' states, and nothing of a Trainer's: the fit "
                f"begins with them at its first epoch and step, with schedules at their beginning."
            )
        return checkpoint

    def _others_see_loaded(self) -> bool:
        """Whether somebody but us looks at what is loaded."""
        module, trainer = self.lightning_module, self._own_trainer
        runs = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if module is None or trainer is None or not runs or self._engine is not None:
            return True
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return not loads_plainly(module) or may_see_loaded(module, callbacks)

    def _load_any(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        if is_folder(checkpoint_path):
            return self._load_folder(checkpoint_path, weights_only)
        if type(self.checkpoint_io) is CheckpointFiles and not self._others_see_loaded():
            together = None if self.is_in_process else self.present_collectives
            checkpoint = self.checkpoint_io.load_mapped(
                checkpoint_path, weights_only, self.run_module, together, self.mesh_rank
            )
            self._mapped = checkpoint.get("state_dict")
            return checkpoint
        return super().load_checkpoint(checkpoint_path, weights_only)

    @property
    def _saves_boxes(self) -> bool:
        """Whether states in shards are asked for as boxes."""
        return self.checkpoint_format == "sharded" and self.saves_shards

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:  # after teardown everything is full again
            self._check_full()
            return self.run_module.state_dict()
        if self._saves_boxes:
            return module_boxes(self.run_module, self._engine)
        streamed = self._stream(self._engine)
        if streamed is not None:
            return streamed.module_state(self.run_module)
        return full_module_state(self.run_module, self._engine)

    def _stream(self, engine: DataParallelEngine) -> StreamedState | None:
        """Return what is streamed in this save; None if somebody looks. Each rank must call."""
        if self._streamed is not None or self._may_stream is None:
            return self._streamed
        # a callback may be on one rank only
        if self.reduce_boolean_decision(self._may_stream) and (file := self._file_to_write()):
            with_frozen = not self.save_trainable_only
            self._streamed = StreamedState(engine, file, with_frozen=with_frozen)
        return self._streamed

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with noting_changes(self.run_module):
            self._load_module(checkpoint, strict)

    def _load_module(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        if self._is_fitting():
            section_of(checkpoint)  # raises for a newer format, before anything is loaded
        left_out = left_out_of(checkpoint)
        averages = self._is_fitting() and self._engine is None
        state = checkpoint["state_dict"]
        if is_stored(state):
            before = self._folders.take_weights(self, state, strict=strict, left_out=left_out)
        else:
            if self._engine is None and self._mapped is not None and state is self._mapped:
                self._lent = MappedParameters(self.run_module, self._mapped)
            before = load_module_state(
                self.run_module,
                state,
                strict=strict,
                left_out=left_out,
                engine=self._engine,
                agree=partial(agree_on_misfit, self.present_collectives),
                paired=checkpoint.get("current_model_state") if averages else None,  # of averages
                lent=self._lent,
            )
        if self._engine is None and "optimizer_states" in checkpoint and self._is_fitting():
            self._resuming = Resuming(checkpoint, before, self._lent)
        elif self._lent is not None:
            self._lent.forget_own()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        engine = self._engine or self._cut_states
        if engine is None:
            self._check_full()
            return raw.state_dict() if self.is_global_zero else {}
        if self._saves_boxes:
            return optimizer_boxes(raw, names_of(self), engine)
        streamed = self._stream(engine)
        return full_state_dict(raw, engine) if streamed is None else streamed.optimizer_state(raw)

    def _check_full(self) -> None:
        if self._left_sharded:
            raise CheckpointError(
                f"Rank {self.mesh_rank}: the last run failed and left shards of its state on the "
                f"ranks, expected full tensors to save. Resume from an earlier checkpoint."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._resuming is None or not self._resuming.has_checked(self.optimizers):
            error = error_of(self._misfits(checkpoint), "only its weights were")
            agree_on_misfit(self.present_collectives, error)
        self._resuming = None
        if self._engine is None:  # after teardown everything is full again
            self._check_full()
            super().load_optimizer_state_dict(checkpoint)
            return
        self._kept.load(self, checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            local = local_state(self, state, optimizer)
            with self.engine.optimizer_view():
                optimizer.load_state_dict(local)

    def _misfits(self, checkpoint: Mapping[str, Any]) -> list[str]:
        states, optimizers = checkpoint["optimizer_states"], self.optimizers
        if states is None:  # they are checked later
            states, optimizers, misfits = [], [], list[str]()
        else:
            states, misfits = checked_names(self, states)
        return misfits or run_misfits(
            {**checkpoint, "optimizer_states": states},
            self.run_module,
            optimizers,
            kept=section_of(checkpoint),
            scaler=getattr(self.precision_plugin, "scaler", None),
            scaler_state=checkpoint.get(MixedPrecision.__qualname__),
            engine=self._engine,
        )

    @property
    def _has_all(self) -> bool:
        """Whether this rank alone has the full state, to save it without asking the others."""
        if self._engine is None:
            return not self._left_sharded
        is_split = not isinstance(self._engine.split, Unsplit)
        return not (self._holds_shards or is_split or self._options.compression is not None)
