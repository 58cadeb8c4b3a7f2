"""The option `same_bits`: what a Trainer's loops do so that bits do not depend on the ranks.

The engine adds their gradients in the order of the numbers (`tree_sum.py`); which they are is said
in `micro_batches.py`. Buffers are those that the first one leaves, while each
begins with those of the step's beginning; means of what is logged are exact.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.torch_private import BatchNorm
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.dimensions.dimension import RunView
from lightning_shard.strategies.micro_batches import (
    AFTER_BACKWARD,
    BATCH_START,
    EPOCH_START,
    EVALUATION,
    OPTIMIZER_STEP,
    TRAINING,
    Dealing,
    begin_random_numbers,
    only_deterministic,
)
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer.hook_advice import hooks_inside
from lightning_shard.strategies.trainer.shared_values import ExactMeans, Logged

_DRAWING_HOOKS = {
    "on_after_backward": AFTER_BACKWARD,
    "optimizer_step": OPTIMIZER_STEP,
    "on_train_epoch_start": EPOCH_START,
}


class SameBits(RunPart):
    """Deals micro-batches, and lets random numbers and buffers follow them."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._means = ExactMeans()
        self._present: tuple[int, ...] = ()  # what the random numbers of the present batch follow
        self._drawn_for: tuple[int, ...] = ()  # the hook that has begun random numbers last

    @contextmanager
    def in_run(self, trainer: "pl.Trainer") -> Iterator[None]:
        """Inside, where the option is set, means are exact and operations deterministic."""
        if not self.is_on:
            yield
            return
        ranks, num_own = self._ranks_of_samples, self._num_own
        with only_deterministic(), self._means.inside(trainer, ranks, num_own):
            yield

    def values_of_epoch(self, key: str, of_epoch: bool) -> Sequence[Logged]:
        """Return what this rank has logged, where its sum is to be exact."""
        if not self.is_on:
            return ()
        return self._means.of(key, last=0 if of_epoch else self._num_own())

    @property
    def is_on(self) -> bool:
        """Whether the option is set."""
        return bool(self.run.options.same_bits)

    def _ranks_of_samples(self) -> Collectives:
        ranks: Collectives = self.strategy.data_collectives
        return ranks

    def _num_own(self) -> int:
        """Micro-batches of a step on each rank."""
        accumulated: int = self.run.trainer.accumulate_grad_batches
        return accumulated

    @property
    def _index(self) -> int:
        """Number of the present micro-batch among this rank's of the step."""
        batches: int = self.run.trainer.fit_loop.epoch_loop.batch_idx
        return batches % self._num_own()

    # --- refusals ---------------------------------------------------------------------------------

    def error(self, why: str) -> ConfigError:
        """Return the error that says why bits would depend on the ranks, and what to do."""
        return ConfigError(f"Rank {self.strategy.mesh_rank}: same_bits=True, but {why}")

    def check(self, view: RunView) -> None:
        """Refuse a fit that could not have the same bits on any number of ranks."""
        for why in (*self._reasons_of_steps(view), *self._reasons_of_ranks()):
            raise self.error(why)

    @property
    def _precision(self) -> str:
        return str(self.strategy.precision_plugin.precision)

    def _reasons_of_steps(self, view: RunView) -> Iterator[str]:
        precision = self._precision
        callbacks: Any = view.module.trainer.callbacks  # type: ignore[attr-defined]
        if not view.module.automatic_optimization:
            yield (
                "the module optimizes by hand, expected automatic optimization, whose steps have "
                "micro-batches that can be counted. Leave same_bits out."
            )
        if precision.startswith("16"):
            yield (
                f"precision={precision!r} leaves out steps by what the ranks' own gradients are, "
                f"expected a format with fp32's range. Use 'bf16-mixed'."
            )
        if view.layer_sync is not None or _has(view.model, nn.SyncBatchNorm):
            yield (
                "batch norms are synchronised over the ranks, expected each micro-batch's own "
                "statistics. Leave sync_batchnorm out."
            )
        if _has(callbacks, GradientAccumulationScheduler):
            yield (
                "GradientAccumulationScheduler changes the number of micro-batches in the fit, "
                "expected one number. Pass Trainer(accumulate_grad_batches=...)."
            )
        if _has(callbacks, StochasticWeightAveraging) and _has(view.model, BatchNorm):
            yield (
                "StochasticWeightAveraging computes the statistics of batch norms anew, from each "
                "rank's own batches, expected those of micro-batches. Use WeightAveraging."
            )

    def _reasons_of_ranks(self) -> Iterator[str]:
        options, num_ranks = self.run.options, self.strategy.data_collectives.size
        for one in self.strategy.dimensions:
            if one.axis != "pp" and self.strategy.mesh.size(one.axis) > 1:
                yield (
                    f"the ranks of the axis {one.axis!r} add up parts of sums that one device adds "
                    f"in one go, expected ranks that have whole samples and whole layers. Use data "
                    f"parallel, ZeRO or pipeline_parallel."
                )
        own, in_copy = self._num_own(), self.strategy.shard_size
        if in_copy not in (1, num_ranks) and in_copy & (in_copy - 1):
            yield (
                f"each copy of the state is in shards on {in_copy} ranks, whose sum is no part of "
                f"the sum in order, expected 2, 4, 8 ... Change data_parallel_size."
            )
        if options.stage < 2 and num_ranks > 1 and own & (own - 1):
            yield (
                f"each of {num_ranks} ranks has {own} micro-batches of a step, whose sum under "
                f"stage {options.stage} is no part of the sum in order, expected 1, 2, 4, 8 ... "
                f"Use strategy='zero2' or 'zero3', or another number of ranks."
            )

    def check_batches(self) -> None:
        """Refuse an epoch whose last step has fewer micro-batches, and what counts a rank's own."""
        num_batches, own = self.run.trainer.num_training_batches, self._num_own()
        for one in self.strategy.lr_scheduler_configs:
            if one.interval == "step" and one.frequency > 1:
                raise self.error(
                    f"{type(one.scheduler).__name__} steps every {one.frequency} batches of a "
                    f"rank, which has fewer on more ranks, expected a frequency of 1. Let its own "
                    f"rule count steps, as LambdaLR(optimizer, lambda step: f(step // "
                    f"{one.frequency}))."
                )
        if num_batches == float("inf") or num_batches % own:
            raise self.error(
                f"each rank has {num_batches} batches of an epoch, so that its last step has fewer "
                f"micro-batches, expected a multiple of accumulate_grad_batches={own}. Change "
                f"limit_train_batches."
            )

    def dealing(self) -> Dealing:
        """Return which micro-batches this rank has."""
        ranks = self.strategy.data_collectives
        return Dealing(
            rank=ranks.rank,
            num_ranks=ranks.size,
            num_own=self._num_own(),
            stage=self.run.options.stage,
            in_each=self._num_in_batch,
            error=self.error,
        )

    # --- steps ------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Begin a micro-batch with its own random numbers, and with the step's buffers."""
        trainer, ranks = self.run.trainer, self.strategy.data_collectives
        own, index = self._num_own(), self._index
        place, before = self.dealing().place(index), self._present
        self._begin_batch(TRAINING, trainer.global_step, place)
        if self._present == before and own * ranks.size > 1:
            raise self.error(
                f"{type(trainer.optimizers[0]).__name__} runs its closure again, and with it each "
                f"rank's last micro-batch alone, expected one run in a step. Use an optimizer that "
                f"takes gradients as they are."
            )
        number = self.run.hooks.num_micro_batches()
        in_batch = self._num_in_batch
        divisor = None if in_batch == 1 else ranks.size * own * in_batch
        self.run.engine.count_micro_batches(number, divisor)
        self._means.counts = number is None or place < number
        if own > 1:
            self.run.engine.buffers.begin_micro_batch(is_first=index == 0)

    def _begin_batch(self, *of: int) -> None:
        self._present = of
        self.begin_microbatch(0)

    def begin_microbatch(self, index: int) -> None:
        """Begin random numbers anew with one of the microbatches into which a pipeline cuts."""
        *of, number = self._present
        number = number * self._num_in_batch + index
        begin_random_numbers(*of, number, device=self.strategy.root_device)

    @property
    def _num_in_batch(self) -> int:
        """Microbatches of a batch: those of a pipeline, which count as micro-batches do."""
        return prod(one.num_parts for one in self.strategy.dimensions)

    def logging(self, values: Sequence[Logged]) -> AbstractContextManager[None]:
        """Inside, a value is logged that is the mean of these."""
        return setting(self._means, parts=values)

    def begin_hooks(self, kind: int) -> None:
        """Where it is set, begin random numbers anew for hooks that follow any micro-batches."""
        if self.is_on:
            number, device = self.run.trainer.global_step, self.strategy.root_device
            begin_random_numbers(kind, number, device=device)

    def around_hooks(self, callbacks: Sequence[Any]) -> Iterator[AbstractContextManager[None]]:
        """Yield what lets random numbers of hooks within a step follow the step's number."""
        for name, kind in _DRAWING_HOOKS.items() if self.is_on else ():
            around = partial(self._in_hook, kind)
            yield hooks_inside(around, self.run.module, callbacks, only=(name,))

    @contextmanager
    def _in_hook(self, kind: int) -> Iterator[None]:
        place = kind, self.run.trainer.global_step, self._index
        if place != self._drawn_for:  # else another's hook goes on where that one has ended
            self.begin_hooks(kind)
        self._drawn_for = place
        yield

    def begin_batch(self) -> None:
        """Begin random numbers anew for the hooks before a batch, also one that was lost."""
        self._present = ()
        if self.is_on and self.run.trainer.training:
            self.begin_hooks(BATCH_START)

    def end_update(self) -> None:
        """Where ranks may be lost, let each have the buffers that all go on from; collective."""
        if self.strategy.assigns_samples:
            self.run.engine.buffers.broadcast_changing()

    def end_backward(self) -> None:
        """Take a micro-batch's buffers back, but for those of the first one at the step's end."""
        own, index = self._num_own(), self._index
        if own > 1:
            self.run.engine.buffers.end_micro_batch(is_first=index == 0, is_last=index == own - 1)

    def begin_evaluation_step(self, batch_idx: int) -> None:
        """Begin a batch of an evaluation with its own random numbers."""
        ranks = self.strategy.data_collectives
        number = batch_idx * ranks.size + ranks.rank
        self._begin_batch(EVALUATION, number)


def _has(objects: Any, kind: type | Callable[..., Any]) -> bool:
    found = objects.modules() if isinstance(objects, nn.Module) else objects
    return any(isinstance(one, kind) for one in found)  # type: ignore[arg-type]
