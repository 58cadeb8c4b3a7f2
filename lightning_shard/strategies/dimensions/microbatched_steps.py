"""A step of the user's module that runs microbatch by microbatch, through the stages of a pipeline.

batch ──> microbatches ──> forwards and backwards ──> one result, one set of logs, on each rank
                           as the schedule says        gradients handed over in the backward
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from typing_extensions import override

from lightning_shard.core.placeholders import is_placeholder, tensors_given
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.pipeline_parallel.gradients import GradientStash, OfLastStage
from lightning_shard.pipeline_parallel.microbatches import (
    BatchLists,
    BatchReader,
    Microbatch,
    merge_outputs,
    split_batch,
    whole_batch,
)
from lightning_shard.pipeline_parallel.needs import Checked, Step
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.split import PipelineSplit
from lightning_shard.strategies.dimensions.dimension import (
    ModuleStep,
    RunView,
    StepKind,
    StepRunner,
)
from lightning_shard.strategies.trainer.hook_advice import may_edit_before_backward
from lightning_shard.strategies.trainer.logs.step_logs import LoggerCalls, StepLogs

_LOADERS: dict[StepKind, str] = {
    "training": "train_dataloader",
    "validation": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}
_CHANGING = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_RAGGED = (
    "A batch has lists of samples whose tensors differ in shape, and a step that pads them would "
    "pad a microbatch to another length than the batch. So such batches run in one part, while "
    "other stages wait. Set batch_lists='samples' where the loss does not depend on padding."
)


class MicrobatchedSteps(StepRunner):
    """Runs steps through a pipeline."""

    def __init__(
        self,
        run: RunView,
        engine: DataParallelEngine,
        pipeline: Pipeline,
        split: PipelineSplit,
        logs: StepLogs,
        *,
        num_parts: int,
        lists: BatchLists,
        on_training: Callable[[int], None],
    ) -> None:
        self._run, self._engine, self._pipeline = run, engine, pipeline
        self._split, self._logs = split, logs
        self._calls = LoggerCalls(run.module, split, run.in_hook, logs)
        self._num_parts, self._lists, self._on_training = num_parts, lists, on_training
        self._in_order = run.in_order is not None
        self._readers: dict[str, BatchReader] = {}
        self._ragged = False  # whether a batch has been left whole for that
        self._num_in_step = 1  # microbatches of the training step that runs
        self._num_counts = 0  # that the step has gathered of this microbatch
        self._counts: dict[int, float] = {}  # of the batch's first microbatch, by their number

    @override
    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if kind == "training":
            return self._train(step, args, kwargs)
        return self._evaluate(kind, step, args, kwargs)

    def check_gather(self, tensor: Tensor, *, sync_grads: bool) -> None:
        """Refuse to gather with gradients of a microbatch, and counts that differ."""
        is_count = tensor.numel() == 1 and not (tensor.requires_grad or is_placeholder(tensor))
        if self._num_in_step > 1 and is_count and (count := float(tensor)).is_integer():
            self._num_counts += 1
            expected = self._counts.setdefault(self._num_counts, count)
            if count != expected:
                raise ConfigError(
                    f"training_step gathers a count, {count:g} in one microbatch and "
                    f"{expected:g} in another, but a mean over what each microbatch counts is not "
                    f"the mean over the whole batch; expected one count in all of them. Set "
                    f"num_microbatches=1, or log the count with self.log(..., reduce_fx='sum')."
                )
        if self._num_in_step > 1 and sync_grads:
            raise ConfigError(
                f"training_step gathers tensors with sync_grads=True, for a loss over the samples "
                f"of the whole batch, but a pipeline runs it for each of {self._num_in_step} "
                f"microbatches, which would be compared only within themselves; expected a step of "
                f"the whole batch. Set num_microbatches=1, or use strategy='zero3'."
            )

    def _train(self, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        microbatches = self._microbatches("training", args)
        self._num_in_step = len(microbatches)
        self._counts.clear()
        if not self._ragged:
            self._on_training(self._num_in_step)
        recorded, scale = self._recorded(step, args, kwargs), self._run.loss_scale()
        with self._engine.step(), isolate_rng(), self._calls.batch():
            try:
                results, stash = self._pipeline.train(
                    "training", microbatches, recorded, _loss, scale
                )
            finally:
                self._num_in_step = 1
            self._split.sum_ties(stash)
        taken = [one for one in microbatches if results.get(one.index) is not None]
        outputs, weight = self._shared(results, taken)
        if outputs is None:  # which Lightning allows on one device only
            return self._without_gradients(stash)
        trainer: Any = self._run.module.trainer
        if may_edit_before_backward(self._run.module, trainer.callbacks):
            stash.on_give = self._pipeline.edits.watched_until_backward()
        if not self._in_order:  # else the engine divides by all micro-batches of the step
            stash.seed = stash.seed * weight  # the mean is over the samples that have a loss
        elif not isclose(weight, 1):
            raise self._error("a microbatch has no loss, expected one of each. Return a loss of 0.")
        return self._with_gradients(outputs, stash)

    def _evaluate(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        microbatches = self._microbatches(kind, args)
        loader = ", ".join(str(one) for one in args[2:])
        with self._engine.step(), isolate_rng(), self._calls.batch():
            recorded = self._recorded(step, args, kwargs)
            results = self._pipeline.evaluate(f"{kind} {loader}", microbatches, recorded)
        if results is None:  # a step that does not use the network
            with self._run.in_hook():  # nobody shows what other stages have
                return step(*args, **kwargs)
        return self._shared(results, microbatches)[0]

    def _microbatches(self, kind: StepKind, args: Sequence[Any]) -> list[Microbatch]:
        """Cut a batch, unless a step that pads its samples would pad parts to other lengths."""
        batch, (index, *_) = args[0], (*args[2:], 0)
        if self._num_parts == 1:  # nothing has to be known of the samples
            return [whole_batch(batch)]
        key = f"{kind} {index}"
        if key not in self._readers:
            self._readers[key] = _reader(self._run.module, kind, index, self._lists)
        reader = self._readers[key]
        size = reader.num_samples(batch)
        num_parts = min(self._num_parts, size)
        if kind == "predict" and num_parts == size:  # 1 is the size of many a dimension
            num_parts = max(1, size // 2)
        if num_parts > 1 and reader.lists == "auto" and reader.is_ragged(batch, size):
            num_parts = 1
            if not self._ragged:
                rank_zero_warn(_RAGGED)
            self._ragged = True
        if self._in_order:
            self._refuse_uneven(kind, size, num_parts)
        return split_batch(batch, self._agreed(num_parts), reader)

    def _refuse_uneven(self, kind: StepKind, size: int, num_parts: int) -> None:
        """Refuse a batch of other microbatches than all others have."""
        if kind != "predict" and (num_parts != self._num_parts or size % num_parts):
            raise self._error(
                f"a batch has {size} samples in {num_parts} microbatches, expected "
                f"{self._num_parts} of one size. Pass DataLoader(..., drop_last=True) with a "
                f"batch_size that is a multiple of num_microbatches."
            )

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"Rank {self._run.rank}: same_bits=True, but {why}")

    def _agreed(self, num_parts: int) -> int:
        """Return the fewest parts of the ranks that meet in each forward, of other samples."""
        for group in (*self._engine.groups_of_forwards(), *self._run.of_forwards):
            fewest = torch.tensor([num_parts], device=self._run.device)
            group.all_reduce(fewest, "min").wait()
            num_parts = int(fewest)
        return num_parts

    def _recorded(self, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """Return what runs the module's step on one microbatch, and records what it logs."""
        completed = self._run.completed

        def recorded(microbatch: Microbatch, checked: Checked | None) -> Any:
            is_last, may_repeat = checked is not None, self._pipeline.is_rehearsing
            self._num_counts = 0
            self._engine.hide_rounded()
            with (
                self._calls.step(microbatch),
                self._logs.recording(
                    microbatch.size,
                    counts=is_last,
                    may_repeat=may_repeat,
                    completed=completed,
                    in_block=self._calls.keep,
                ) as note,
            ):
                with tensors_given() as given, asking(OfLastStage(given)), _telling(microbatch):
                    result = completed(step(microbatch.content, *args[1:], **kwargs))
                if checked is not None:  # in here: what it refuses has logged and counted nothing
                    checked(result)
                loss = _loss(result)
                note.loss = None if loss is None or is_placeholder(loss) else loss.detach()
                return result

        return recorded

    def _shared(self, results: dict[int, Any], microbatches: list[Microbatch]) -> tuple[Any, float]:
        """Merge what the last stage's steps have returned, and give it to every rank."""
        outputs, weight = None, sum(one.weight for one in microbatches)
        if self._pipeline.has_last_stage and microbatches:
            sizes = [one.size for one in microbatches]
            outputs = merge_outputs([results[one.index] for one in microbatches], sizes)
        outputs, weight = self._logs.replay((outputs, weight))
        self._calls.give()
        return outputs, float(weight)

    def _without_gradients(self, stash: GradientStash) -> Tensor:
        """Return a loss that leaves every parameter without a gradient: the batch is skipped."""
        stash.clear()
        loss = torch.zeros((), device=self._run.device)
        return stash.hand_over(loss, self._engine.take_gradient)

    def _with_gradients(self, outputs: Any, stash: GradientStash) -> Any:
        """Connect the loss that the step returns with the gradients that are already there."""
        loss = _loss(outputs)
        if loss is None:
            return outputs
        handed = stash.hand_over(loss, self._engine.take_gradient)
        return {**outputs, "loss": handed} if isinstance(outputs, Mapping) else handed


def _reader(module: Any, kind: StepKind, index: int, lists: BatchLists) -> BatchReader:
    """Return who reads the batches of a loader, or of several at once, from what these tell."""
    trainer = module.trainer
    loader = getattr(trainer, _LOADERS[kind])
    if kind != "training" and isinstance(loader, list | tuple):
        loader = loader[index]
    owners = [(module, pl.LightningModule), (trainer.datamodule, pl.LightningDataModule)]
    collates = [getattr(one, "collate_fn", None) for one in tree_leaves(loader)]
    is_default = all(one is default_collate for one in collates) and not any(
        owner is not None and is_overridden(name, owner, parent)
        for owner, parent in owners
        for name in _CHANGING
    )
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return BatchReader("fields" if is_default and lists == "auto" else lists, size)


@contextmanager
def _telling(microbatch: Microbatch) -> Iterator[None]:
    """Note at the user's errors of how many samples they are, of which a batch has more."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        if microbatch.weight < 1:
            error.add_note(
                f"Raised in the step of a microbatch of {microbatch.size} of the batch's "
                f"{round(microbatch.size / microbatch.weight)} samples, into which a pipeline cuts "
                f"a batch; num_microbatches=1 leaves it whole."
            )
        raise


def _loss(result: Any) -> Tensor | None:
    found = result.get("loss") if isinstance(result, Mapping) else result
    return found if isinstance(found, Tensor) else None
