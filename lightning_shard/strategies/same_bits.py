"""The option `same_bits`: what a Trainer's loops do so that bits do not depend on the ranks.

    step k of M micro-batches, numbers k M ... k M + M - 1, each always of the same samples

    stages 0, 1   rank r of N    k M + r L ... k M + r L + L - 1        L = M / N neighbours
    stages 2, 3                  k M + r, k M + r + N ...

The engine adds their gradients in the order of the numbers (`tree_sum.py`). Random numbers begin
anew with each micro-batch, from its number; buffers are those that the first one leaves, while each
begins with those of the step's beginning; means of what is logged are exact.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from threading import Lock
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core import settings
from lightning_shard.core.states import setting
from lightning_shard.elastic.data_loaders import replace_samplers
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.dimensions.dimension import RunView
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer.exact_means import ExactMeans, Logged

_TRAINING, _EVALUATION = range(2)


class NumberedSamples(list[Any]):
    """The indices of a batch's samples, of which each micro-batch begins random numbers anew.

    It does so when they are read one by one, in the process that does, which may be a worker.
    """

    def __init__(self, indices: Sequence[Any], seeds: Sequence[int]) -> None:
        super().__init__(indices)
        self._seeds = seeds

    @override
    def __iter__(self) -> Iterator[Any]:
        size = -(-len(self) // len(self._seeds))
        for place in range(len(self)):
            if place % size == 0:
                _begin_from(self._seeds[place // size])
            yield self[place]

    @override
    def __reduce__(self) -> Any:  # pickle would iterate, amid a step of this process
        return NumberedSamples, (self[:], self._seeds)


class DealtBatches:
    """This rank's batches of an epoch, by their numbers among those of one device.

    Each has the samples of `in_each` micro-batches.
    """

    def __init__(
        self,
        sampler: "DistributedSampler[Any]",
        size: int,
        numbers: Sequence[int],
        kind: int,
        in_each: int = 1,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, size, False
        self._numbers, self._kind, self._in_each = numbers, kind, in_each

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[Any]]:
        given = self.sampler
        whole: DistributedSampler[Any] = DistributedSampler(
            given.dataset, num_replicas=1, rank=0, shuffle=given.shuffle, seed=given.seed
        )
        whole.set_epoch(given.epoch)
        order, size = list(whole), self.batch_size
        for number in self._numbers:
            parts = range(number * self._in_each, (number + 1) * self._in_each)
            seeds = [_seed_of(self._kind, given.epoch, part) for part in parts]
            _begin_from(seeds[0])  # for what is read all at once
            yield NumberedSamples(order[number * size : (number + 1) * size], seeds)


def begin_random_numbers(*of: int, device: torch.device | None = None) -> None:
    """Let torch's, numpy's and Python's random numbers follow from the job's seed and these."""
    _begin_from(_seed_of(*of), device)


def _seed_of(*of: int) -> int:
    return int(np.random.SeedSequence((settings.global_seed(), *of)).generate_state(1)[0])


def _begin_from(seed: int, device: torch.device | None = None) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a stack for each device
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


_asking = Lock()
_before: list[tuple[bool, bool, bool]] = []  # as it was when the first of several runs has asked
_num_asking = 0


@contextmanager
def only_deterministic() -> Iterator[None]:
    """Let torch refuse, inside, each operation of which it has no deterministic form, by name."""
    global _num_asking
    of_memory: Any = torch.utils.deterministic
    with _asking:
        _num_asking += 1
        if _num_asking == 1:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            is_on = torch.are_deterministic_algorithms_enabled()
            _before.append((is_on, warns, of_memory.fill_uninitialized_memory))
            torch.use_deterministic_algorithms(True)
            of_memory.fill_uninitialized_memory = is_on and _before[0][2]  # which takes long
    try:
        yield
    finally:
        with _asking:
            _num_asking -= 1
            if not _num_asking:
                is_on, warns, fills = _before.pop()
                torch.use_deterministic_algorithms(is_on, warn_only=warns)
                of_memory.fill_uninitialized_memory = fills


def number_in_step(rank: int, num_ranks: int, index: int, *, num_own: int, stage: int) -> int:
    """Return the number within its step of the micro-batch that is so many-th on a rank."""
    return rank * num_own + index if stage < 2 else index * num_ranks + rank


class SameBits(RunPart):
    """Deals micro-batches, and lets random numbers and buffers follow them."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._means = ExactMeans()
        self._present: tuple[int, ...] = ()  # what the random numbers of the present batch follow

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

    @property
    def _has_neighbours(self) -> bool:
        return bool(self.run.options.stage < 2)

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
        for why in self._reasons(view):
            raise self.error(why)

    def _reasons(self, view: RunView) -> Iterator[str]:
        options, num_ranks = self.run.options, self.strategy.data_collectives.size
        precision = str(self.strategy.precision_plugin.precision)
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
        for one in self.strategy.dimensions:
            if one.axis != "pp" and self.strategy.mesh.size(one.axis) > 1:
                yield (
                    f"the ranks of the axis {one.axis!r} add up parts of sums that one device adds "
                    f"in one go, expected ranks that have whole samples and whole layers. Use data "
                    f"parallel, ZeRO or pipeline_parallel."
                )
            elif one.axis == "pp" and precision == "bf16-true":
                yield (
                    "precision='bf16-true' rounds what a pipeline's microbatches add up to before "
                    "it is divided, expected fp32 or 'bf16-mixed'. Use data parallel or ZeRO."
                )
        own, in_copy = self._num_own(), self.strategy.shard_size
        if in_copy not in (1, num_ranks) and in_copy & (in_copy - 1):
            yield (
                f"each copy of the state is in shards on {in_copy} ranks, whose sum is no part of "
                f"the sum in order, expected 2, 4, 8 ... Change data_parallel_size."
            )
        if self._has_neighbours and num_ranks > 1 and own & (own - 1):
            yield (
                f"each of {num_ranks} ranks has {own} micro-batches of a step, whose sum under "
                f"stage {options.stage} is no part of the sum in order, expected 1, 2, 4, 8 ... "
                f"Use strategy='zero2' or 'zero3', or another number of ranks."
            )

    def check_batches(self) -> None:
        """Refuse an epoch whose last step has fewer micro-batches than the others."""
        num_batches, own = self.run.trainer.num_training_batches, self._num_own()
        if num_batches == float("inf") or num_batches % own:
            raise self.error(
                f"each rank has {num_batches} batches of an epoch, so that its last step has fewer "
                f"micro-batches, expected a multiple of accumulate_grad_batches={own}. Change "
                f"limit_train_batches."
            )

    # --- samples ----------------------------------------------------------------------------------

    def dealt(self, loader: Any, *, is_training: bool) -> Any:
        """Return a loader of this rank's micro-batches, or of its batches of an evaluation."""
        sampler, batches = (getattr(loader, one, None) for one in ("sampler", "batch_sampler"))
        if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            given = sampler or getattr(loader, "dataset", loader)
            raise self.error(
                f"samples cannot be dealt by their numbers, got {type(given).__name__}, expected a "
                f"torch DataLoader with a batch_size, of a dataset with a length, and no sampler "
                f"of its own."
            )
        of_one: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        num_batches = len(BatchSampler(of_one, batches.batch_size, batches.drop_last))
        is_even = batches.drop_last or len(of_one) % batches.batch_size == 0
        numbers = self._numbers(num_batches, is_even, batches.drop_last, is_training=is_training)
        kind = _TRAINING if is_training else _EVALUATION
        loader, in_each = copy.copy(loader), self._num_in_batch
        dealt = DealtBatches(sampler, batches.batch_size, numbers, kind, in_each)
        replace_samplers(loader, sampler, dealt)
        return loader

    def _numbers(
        self, num_batches: int, is_even: bool, drop_last: bool, *, is_training: bool
    ) -> Sequence[int]:
        """Return the numbers of this rank's batches among those of an epoch."""
        ranks, rank = self.strategy.data_collectives.size, self.strategy.data_collectives.rank
        own = self._num_own() if is_training else 1
        num_steps, rest = divmod(num_batches, own * ranks)
        if is_training and (rest or not is_even) and not drop_last:
            raise self.error(
                f"the last step of an epoch of {num_batches} batches would have fewer samples, "
                f"expected whole steps of {own * ranks} micro-batches. Pass "
                f"DataLoader(..., drop_last=True)."
            )
        if not is_training and rest:
            raise self.error(
                f"an evaluation has {num_batches} batches, some of which {ranks} ranks would have "
                f"twice, expected a multiple of the ranks. Pass DataLoader(..., batch_size=...)."
            )
        if not (is_training and self._has_neighbours):
            return range(rank, num_steps * own * ranks, ranks)
        return [(k * ranks + rank) * own + j for k in range(num_steps) for j in range(own)]

    # --- steps ------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Begin a micro-batch with its own random numbers, and with the step's buffers."""
        trainer, ranks = self.run.trainer, self.strategy.data_collectives
        own, index = self._num_own(), self._index
        stage = self.run.options.stage
        place = number_in_step(ranks.rank, ranks.size, index, num_own=own, stage=stage)
        self._begin_batch(_TRAINING, trainer.global_step, place)
        number = self.run.hooks.num_micro_batches()
        self.run.engine.count_micro_batches(number, self._num_in_batch)
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
        self._begin_batch(_EVALUATION, number)


def _has(objects: Any, kind: type | Callable[..., Any]) -> bool:
    found = objects.modules() if isinstance(objects, nn.Module) else objects
    return any(isinstance(one, kind) for one in found)  # type: ignore[arg-type]
