"""The callback that records steps on real ranks: `RecordSteps`.

batch fetched ── a boundary? ──> copy this rank's state       (in host memory)
     │                           and forget the batches before it
     ├─ keep the batch and the random streams
     v
step ── an error? a loss that is not finite? a step that was asked for? ──> this rank's file
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.random_state import random_state
from lightning_shard.checkpoint.rank_snapshot import take
from lightning_shard.core.extensions import around
from lightning_shard.core.options import AtLeastOne, AtLeastZero, checked_options
from lightning_shard.core.schemes import BY_STAGE
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.replay.rank_record import Given, RankRecord, own_error, state_digest, versions
from lightning_shard.replay.tape import ResultRecorder, full_copies, take_place
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.trainer._lightning import around_sigterm_broadcast, layer_sync
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks
from lightning_shard.tools.proving.strategies import batches_seen


class RecordSteps(OnlyLooks, Callback):
    """Record a step on every rank when it fails, has a loss that is not finite, or is asked for.

    `lightning-shard replay` takes the step again in one process. What a step begins from must be
    kept before it is known how it ends: with `failures`, each rank copies its shard of parameters
    and optimizer state into host memory every `snapshot_every` steps, and keeps the batches since;
    a step in between is taken again from there, with those before it. Files are written only for
    the steps that are recorded. Each batch takes a collective of one number, so that all ranks
    record a loss that is not finite on one of them.

    Args:
        folder: Gets a folder of each recorded step, `step-00000012`; ranks of several hosts need a
            common one, or their files copied into one.
        steps: Numbers of steps that are recorded whatever comes of them, counted from 0.
        failures: Whether a step is recorded that raises an error, and the first whose loss is not
            finite.
        snapshot_every: Steps from one copy of the state to the next.
        results: Whether the results of collectives are kept as well, in host memory as large as
            what the rank receives in a step, so that `replay(rank=...)` takes one rank alone.

    Raises:
        ConfigError: A number below its least value, or nothing is asked for; when a fit begins,
            another strategy than `shard_ddp`, `zero1`, `zero2` and `zero3`, or one that compresses.
        CheckpointError: A file cannot be written.
    """

    @checked_options
    def __init__(
        self,
        folder: str | Path,
        steps: Sequence[AtLeastZero] = (),
        failures: bool = True,
        snapshot_every: AtLeastOne = 1,
        results: bool = False,
    ) -> None:
        if not steps and not failures:
            raise ConfigError(
                "RecordSteps got no steps and failures=False, so that it would record nothing. "
                "Pass steps=[12], say, or leave failures as it is."
            )
        self._folder, self._steps, self._failures = Path(folder), frozenset(steps), failures
        self._snapshot_every = snapshot_every
        self._results = ResultRecorder() if results else None
        self._buffers = HostBuffers()
        self._in_fit = ExitStack()
        self._record: RankRecord | None = None
        self._begun_at = -1  # number of the step that the last batch was of
        self._must_begin = True
        self._has_told_loss, self._asked_for = False, set(self._steps)
        self._num_losses = 0  # when the present batch began

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _check(trainer, with_results=self._results is not None)
        self._close()
        self._in_fit.enter_context(batches_seen(trainer, partial(self._note, trainer)))
        if self._results is not None:
            self._in_fit.enter_context(_noting_steps(trainer, self._results))

    def _note(self, trainer: "pl.Trainer", batch: Any) -> None:
        if not trainer.training:
            return
        step = trainer.global_step
        if step != self._begun_at:  # else gradients of this step are there
            self._begun_at = step
            if self._begins(step):
                self._begin(trainer, step)
        if self._record is None:
            return
        self._record.step = step
        self._num_losses = len(self._record.losses)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self._record.given.append(
            Given(
                batch=tree_map_only(Tensor, host_copy, batch),
                random=random_state(trainer.strategy.root_device),
                is_last=progress.is_last_batch,
            )
        )

    def _begins(self, step: int) -> bool:
        """Whether the record begins anew with a step."""
        if self._record is None or not self._failures:
            return self._failures or step in self._steps
        since = step - self._record.start
        return self._must_begin or step in self._steps or since >= self._snapshot_every

    def _begin(self, trainer: "pl.Trainer", step: int) -> None:
        if self._record is not None:
            self._buffers.give_back(self._record.snapshot.data)
        strategy = trainer.strategy
        assert isinstance(strategy, DataParallelStrategy)
        self._must_begin, self._num_losses = False, 0
        self._record = RankRecord(
            rank=strategy.mesh_rank,
            num_ranks=strategy.mesh_size,
            start=step,
            step=step,
            reason="",
            setup=_setup(trainer, strategy),
            place=take_place(trainer),
            buffers={
                name: host_copy(one) for name, one in trainer.lightning_module.named_buffers()
            },
            snapshot=take(strategy.engine, strategy.optimizers, step=step, buffers=self._buffers),
            orders=strategy.engine.learnt_orders(),
        )
        if self._results is not None:
            self._results.clear()
            self._record.results = self._results.results
            self._record.full = full_copies(strategy.engine)

    @override
    def on_before_backward(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor
    ) -> None:
        if self._record is not None:
            self._record.losses.append(loss.detach().clone())

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any, **__: Any) -> None:
        if self._failures and not self._has_told_loss:
            self._look_at_losses(trainer)
        record = self._record
        if record is not None and record.step in self._steps and trainer.global_step > record.step:
            if record.start == record.step:  # else it was recorded for another reason
                self._asked_for.discard(record.step)
                _tell(record.step, "was asked for", self._write(trainer, "asked"))
            if not self._failures:
                self._buffers.give_back(record.snapshot.data)
                self._record, self._must_begin = None, True

    def _look_at_losses(self, trainer: "pl.Trainer") -> None:
        losses = self._record.losses[self._num_losses :] if self._record is not None else []
        mine = any(not torch.isfinite(one).all() for one in losses)
        with nullcontext() if self._results is None else self._results.paused():
            is_told = trainer.strategy.reduce_boolean_decision(mine, all=False)
        if is_told:
            self._has_told_loss = True
            if self._record is not None:
                why = "has a loss that is not finite, on one rank at least"
                _tell(self._record.step, why, self._write(trainer, "loss"), warns=True)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._must_begin = True  # schedulers and callbacks may act on what was validated

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._must_begin = True

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        if self._failures and self._record is not None and isinstance(exception, Exception):
            self._record.error = own_error(exception)
            try:
                path = self._write(trainer, "failure")
            except CheckpointError as error:  # what has failed is what counts
                _note(exception, f"The step was not recorded: {error}")
            else:
                _note(exception, f"The step is recorded: lightning-shard replay {path.parent}")
        self._close()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._asked_for:
            rank_zero_warn(
                f"RecordSteps has not recorded the steps {sorted(self._asked_for)}, which it was "
                f"asked for: no step of this fit, of {trainer.global_step}, began with these "
                f"numbers. Steps are counted from 0, and each optimizer's counts."
            )
        self._close()

    def _write(self, trainer: "pl.Trainer", reason: str) -> Path:
        record, strategy = self._record, trainer.strategy
        assert record is not None
        assert isinstance(strategy, DataParallelStrategy)
        record.reason = reason
        record.losses = [host_copy(one) for one in record.losses]
        buffers = trainer.lightning_module.buffers()
        record.state = state_digest(strategy.engine, strategy.optimizers, buffers)
        return record.save(self._folder / f"step-{record.step:08d}")

    def _close(self) -> None:
        self._in_fit.close()
        self._record, self._must_begin, self._begun_at = None, True, -1
        self._has_told_loss, self._buffers = False, HostBuffers()
        self._asked_for = set(self._steps)  # and not recorded yet


@contextmanager
def _noting_steps(trainer: "pl.Trainer", results: ResultRecorder) -> Iterator[None]:
    """Note what steps get: a replay neither validates nor saves, compares nor heeds signals."""
    strategy: Any = trainer.strategy
    with (
        around(trainer, "save_checkpoint", results.paused),
        strategy.run.loops.comparing_in(results.paused),
        around_sigterm_broadcast(trainer, results.paused),
        results.noting(lambda: bool(trainer.training)),
    ):
        yield


def _tell(step: int, why: str, path: Path, *, warns: bool = False) -> None:
    """Say on rank 0 that a step is recorded, and how to take it again."""
    say = rank_zero_warn if warns else rank_zero_info
    goes_on = " The fit goes on; later losses that are not finite are not recorded."
    say(
        f"RecordSteps: step {step} {why}, and is recorded. Take it again with the fit's "
        f"configuration: lightning-shard replay {path.parent}{goes_on if warns else ''}"
    )


def _note(exception: BaseException, text: str) -> None:
    """Add a note, once: ranks of one process may be raised the same exception."""
    if text not in getattr(exception, "__notes__", ()):
        exception.add_note(text)


def _check(trainer: "pl.Trainer", *, with_results: bool) -> None:
    """Raise if the steps of this fit cannot be taken again."""
    strategy = trainer.strategy
    name = strategy_name(strategy)
    if name not in BY_STAGE or not isinstance(strategy, DataParallelStrategy):
        raise ConfigError(
            f"RecordSteps got the strategy {name!r}, expected one of {', '.join(BY_STAGE)}: of "
            f"others a step depends on more than a rank's shards and its batch. Leave the callback "
            f"out, or record the fit under one of these."
        )
    if strategy.compression is not None:
        raise ConfigError(
            f"RecordSteps got a strategy that compresses ({type(strategy.compression).__name__}), "
            f"whose residuals it does not record; expected compression=None. Leave one of the two "
            f"out."
        )
    if with_results and strategy.is_in_process:
        raise ConfigError(
            "RecordSteps got results=True in a fit whose ranks all run in this process, expected "
            "processes: one rank is replayed alone where all do not fit, and these do. Leave "
            "results out."
        )
    if strategy.offload is not None:
        raise ConfigError(
            f"RecordSteps got {name!r} with offload={strategy.offload!r}, which replay does not "
            f"take; expected offload=None. Leave one of the two out."
        )
    if "dataloader_iter" in signature(trainer.lightning_module.training_step).parameters:
        raise ConfigError(
            f"{type(trainer.lightning_module).__name__}.training_step takes dataloader_iter and "
            f"fetches its batches itself, which RecordSteps does not see; expected a batch. Take "
            f"batch and batch_idx, or leave the callback out."
        )


def _setup(trainer: "pl.Trainer", strategy: DataParallelStrategy) -> dict[str, Any]:
    """Return the options that change what is computed, and the versions that compute it."""
    algorithm = trainer.gradient_clip_algorithm
    return {
        "strategy": strategy_name(strategy),
        "backend": strategy.backend.name,
        "bucket_mb": None if (chosen := strategy.bucket_choice) is None else chosen.mb,
        "device": strategy.root_device.type,
        "threads": torch.get_num_threads(),
        "num_batches": trainer.num_training_batches,
        "module": f"{type(trainer.lightning_module).__module__}."
        f"{type(trainer.lightning_module).__qualname__}",
        "options": {
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if algorithm is None else str(algorithm.value),
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "detect_anomaly": torch.is_anomaly_enabled(),
            "sync_batchnorm": layer_sync(strategy) is not None,
        },
        "versions": versions(pl),
    }
