"""Saving and loading full checkpoints, brought together from the ranks' shards."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.files.checksums import verify_folder
from lightning_shard.checkpoint.frozen import leave_out_frozen, left_out_of
from lightning_shard.checkpoint.full import full_module_state, load_module_state
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.checkpoint.resuming import (
    Resuming,
    agree_on_failure,
    agree_on_misfit,
    error_of,
    run_misfits,
)
from lightning_shard.checkpoint.section import section_of, writable_section
from lightning_shard.checkpoint.sharded.run_state import module_boxes, optimizer_boxes
from lightning_shard.checkpoint.streamed import StreamedState
from lightning_shard.checkpoint.user_shards import join_shards
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from lightning_shard.strategies.kept_state import KeepingStrategy
from lightning_shard.strategies.sharded_checkpoints import FolderStrategy, is_folder, is_stored
from lightning_shard.trainer.hook_advice import may_see_checkpoints


class CheckpointingStrategy(FolderStrategy, KeepingStrategy):
    """Saves and loads full checkpoints, during a run from the engine's shards."""

    _may_stream: bool | None  # in the middle of a save, as far as this rank can see
    _streamed: StreamedState | None  # in the middle of a save
    _left_sharded: bool  # by a failed run: there is nothing whole to save
    _resuming: Resuming | None  # until everything is known to fit

    @property
    def engine(self) -> DataParallelEngine:
        """The engine; there from `setup` to `teardown`."""
        if self._engine is None:
            raise ConfigError("There is no engine before the strategy's setup or after teardown.")
        return self._engine

    @property
    def _holds_shards(self) -> bool:
        """Whether this rank's state is less than a single device's."""
        return self._options.stage > 0

    @override
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint and (entries := self._section_entries()):
            writable_section(checkpoint).update(entries)
        self._leave_out_frozen(checkpoint)
        if self._engine is not None and self._options.stage == 3:
            join_shards(checkpoint, self._engine)
        failure: Exception | None = None
        try:
            self._save(checkpoint, filepath, storage_options)
        except Exception as error:  # a plugin's may be any
            failure = error
        agree_on_failure(self._present_collectives, failure)

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

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write a checkpoint on rank 0; each rank must call."""
        if self.checkpoint_format == "sharded":
            self._check_writer(storage_options)
            self._save_folder(checkpoint, filepath, alone=False)
            return
        streamed, files = self._streamed, self.checkpoint_io
        if streamed is None or not isinstance(files, CheckpointFiles):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._seeing_shards():
            try:
                if self.is_global_zero:
                    files.save_records(streamed.records(checkpoint), filepath, storage_options)
            finally:
                streamed.finish()

    @override
    def _begin_run(self, trainer: "pl.Trainer") -> None:
        super()._begin_run(trainer)
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._streaming(trainer):
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
            self._streamed, self._may_stream = None, None

    def _nobody_looks(self, trainer: "pl.Trainer") -> bool:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        is_seen = may_see_checkpoints(trainer.lightning_module, callbacks)
        saves_alone = self._present_collectives is None
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
        failure: Exception | None = None
        checkpoint: dict[str, Any] = {}
        try:
            checkpoint = self._load_any(checkpoint_path, weights_only)
        except Exception as error:  # a plugin's may be any
            failure = error
        agree_on_failure(self._present_collectives, failure)
        return checkpoint

    def read_alone(self, path: Path) -> Mapping[str, Any]:
        """Return a checkpoint that this rank reads by itself, in a run or not.

        Raises:
            CheckpointError: It is damaged, or not complete.
        """
        if is_folder(path):
            verify_folder(path)
            return self._load_folder(path, None)
        return self.checkpoint_io.load_checkpoint(path)

    def _load_any(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        if is_folder(checkpoint_path):
            return self._load_folder(Path(checkpoint_path), weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is None:  # after teardown everything is full again
            self._check_full()
            return self.lightning_module.state_dict()
        if self._saves_boxes:
            return module_boxes(self.lightning_module, self._engine)
        # a callback may be on one rank only
        if self._may_stream is not None and self.reduce_boolean_decision(self._may_stream):
            self._streamed = self._streamed or StreamedState(self._engine)
            return self._streamed.module_state(self.lightning_module)
        return full_module_state(self.lightning_module, self._engine)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._is_fitting():
            section_of(checkpoint)  # raises for a newer format, before anything is loaded
        left_out = left_out_of(checkpoint)
        averages = self._is_fitting() and self._engine is None
        if is_stored(checkpoint["state_dict"]):
            before = self._take_stored(checkpoint["state_dict"], strict=strict, left_out=left_out)
        else:
            before = load_module_state(
                self.lightning_module,
                checkpoint["state_dict"],
                strict=strict,
                left_out=left_out,
                engine=self._engine,
                agree=partial(agree_on_misfit, self._present_collectives),
                paired=checkpoint.get("current_model_state") if averages else None,  # of averages
            )
        if self._engine is None and "optimizer_states" in checkpoint and self._is_fitting():
            self._resuming = Resuming(checkpoint, before)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._engine is None:
            self._check_full()
            return raw.state_dict() if self.is_global_zero else {}
        if self._saves_boxes:
            return optimizer_boxes(raw, self._names(), self._engine)
        if self._streamed is not None:
            return self._streamed.optimizer_state(raw)
        return full_state_dict(raw, self._engine)

    def _check_full(self) -> None:
        if self._left_sharded:
            raise CheckpointError(
                f"Rank {self.global_rank}: the last run failed and left shards of its state on the "
                f"ranks, expected full tensors to save. Resume from an earlier checkpoint."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._resuming is None:
            agree_on_misfit(self._collectives, error_of(self._misfits(checkpoint)))
        self._resuming = None
        self._load_kept(checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            local = self._local_optimizer_state(state, optimizer)
            with self.engine.optimizer_view():
                optimizer.load_state_dict(local)

    def _misfits(self, checkpoint: Mapping[str, Any]) -> list[str]:
        assert self.lightning_module is not None
        states, misfits = self._checked_names(checkpoint["optimizer_states"])
        return misfits or run_misfits(
            {**checkpoint, "optimizer_states": states},
            self.lightning_module,
            self.optimizers,
            kept=section_of(checkpoint),
            scaler=getattr(self.precision_plugin, "scaler", None),
            scaler_state=checkpoint.get(MixedPrecision.__qualname__),
            engine=self._engine,
        )

    @property
    @override
    def _has_all(self) -> bool:
        if self._engine is None:
            return not self._left_sharded
        is_split = not isinstance(self._engine.split, Unsplit)
        return not (self._holds_shards or is_split or self._options.compression is not None)
