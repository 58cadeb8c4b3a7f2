"""The training data of an elastic run: assigned to the ranks of the moment, each sample once.

    global batch held      24 samples a step:  4 ranks x 6        3 ranks x 8 = 2 x 4 accumulated
    batch per rank held    24 samples a step on 4 ranks, 18 on 3, with a smaller learning rate

Where a step has another number of batches than for the first ranks, what goes by Lightning's counts
of batches is due behind the same steps, here a validation after every third one:

    4 ranks    0 1 2 v 3 4 5 v 6                      1 batch a step
    3 ranks    0 0 1 1 2 2 v 3 3 4 4 5 5 v 6          2 batches a step

Where each rank's batch is held, everything that is a learning rate is multiplied by one factor:

    rule      factor               source
    linear    new / old            Goyal et al., arXiv:1706.02677
    sqrt      sqrt(new / old)      Krizhevsky, arXiv:1404.5997; Hoffer et al., arXiv:1705.08741

Private names of torch's schedulers, checked with torch 2.13: `_last_lr`, and the `_schedulers` that
one is made of; `tests/elastic/test_data_assignment.py` fails when one changes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core import settings
from lightning_shard.elastic._lightning import epoch_of_samplers, is_within_step, val_check_interval
from lightning_shard.elastic.elastic_sampler import (
    ElasticBatchSampler,
    batches_asked_for,
    find_order,
    install,
)
from lightning_shard.elastic.epoch_order import Position
from lightning_shard.elastic.shares import num_parts
from lightning_shard.errors import ConfigError, RankFailedError

Rule = Literal["linear", "sqrt"]

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # the last ones: OneCycleLR, SWALR
SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")


def rescale(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    old_ranks: int,
    new_ranks: int,
    rule: Rule = "linear",
) -> None:
    """Multiply learning rates as the rule says, lower bounds of schedules included.

    Each rank must call, newcomers after they have got the others' state. A rate that is a tensor is
    changed in place. Schedulers that are not torch's change where names are as torch's. Momentum
    needs no correction: torch's SGD multiplies by the rate outside its momentum buffer.
    """
    scale = _scaling(old_ranks, new_ranks, rule)
    done: set[int] = set()  # a tensor may be the rate of several groups
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in GROUP_RATES:
                if name in group:
                    group[name] = _scaled(group[name], scale, done)
    for scheduler in _with_nested(schedulers):
        _rescale_scheduler(scheduler, scale, done)


def _rescale_scheduler(scheduler: Any, scale: Callable[[Any], Any], done: set[int]) -> None:
    rates = {name: vars(scheduler)[name] for name in SCHEDULER_RATES if name in vars(scheduler)}
    if not rates:
        rank_zero_warn(
            f"The number of ranks has changed, and with it the learning rates, but the scheduler "
            f"of type {type(scheduler).__name__} keeps none under the names of torch's schedulers, "
            f"{', '.join(SCHEDULER_RATES)}. If it computes rates from numbers of its own, these "
            f"are still for the old number of ranks: derive it from torch's LRScheduler."
        )
    for name, value in rates.items():
        if isinstance(value, (list, tuple)):
            value = type(value)(_scaled(one, scale, done) for one in value)
        elif value is not None:
            value = _scaled(value, scale, done)
        setattr(scheduler, name, value)


def _scaling(old_ranks: int, new_ranks: int, rule: str) -> Callable[[Any], Any]:
    if min(old_ranks, new_ranks) < 1:
        raise ConfigError(
            f"A learning rate is for at least 1 rank, got {old_ranks} before and {new_ranks} now."
        )
    if rule == "linear":
        return lambda rate: rate * new_ranks / old_ranks
    if rule == "sqrt":
        factor = math.sqrt(new_ranks / old_ranks)
        return lambda rate: rate * factor
    raise ConfigError(f"The learning rate's rule must be 'linear' or 'sqrt', got {rule!r}.")


@torch.no_grad()
def _scaled(rate: Any, scale: Callable[[Any], Any], done: set[int]) -> Any:
    if not isinstance(rate, Tensor):
        return scale(rate)
    if id(rate) not in done:
        done.add(id(rate))
        rate.copy_(scale(rate))
    return rate


def _with_nested(schedulers: Iterable[Any]) -> list[Any]:
    """Each scheduler once, those inside others included."""
    found: dict[int, Any] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in found:
            found[id(scheduler)] = scheduler
            waiting.extend(vars(scheduler).get("_schedulers", ()))
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class BatchAssignment:
    """The samples and batches of an optimizer step, as the Trainer's options have settled them.

    Attributes:
        global_batch: Samples of an optimizer step; None where each rank's batch is held.
        accumulation: The batches that all ranks the Trainer asks for would accumulate for a step.
        num_ranks: The number of ranks that the learning rates are scaled for now.
    """

    global_batch: int | None
    accumulation: int
    num_ranks: int
    position: Position


class DataAssignment:
    """Assigns one training loader.

    Args:
        trainer: The Trainer, in its fit.
        first_ranks: The number of ranks that the Trainer asks for, whether or not all have come.
        global_batch_size: Samples of an optimizer step; None for what those ranks would have.
        scaling: How the learning rate follows the number of ranks, where each rank's batch is held;
            None holds the global batch.
        in_order: Whether a step has micro-batches of one size, dealt by their numbers.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        first_ranks: int,
        global_batch_size: int | None = None,
        scaling: Literal["linear", "sqrt"] | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self._global_batch_size = self._global_batch = global_batch_size
        self._asked_batch = 0  # the samples of a step by the options of this run
        self._scaling, self._in_order = scaling, in_order
        self._trainer = trainer
        self._first_ranks = first_ranks
        self._user_accumulation = trainer.accumulate_grad_batches
        self._first_accumulation: int | None = None
        self._num_ranks = 0
        self._position = Position(epoch=0)
        self._noted_step = 0
        self._has_taken_over = False
        self._loaded_accumulation: int | None = None
        self._loaded_ranks = 0
        self._is_resumed = False
        self._limit: float | None = None  # the Trainer's, while the loader is made
        self._sampler: ElasticBatchSampler | None = None
        self._remove: Callable[[], None] | None = None  # takes the sampler out of the loader

    def end(self) -> None:
        """Give the loader its own samplers back, and the Trainer its accumulation."""
        if self._remove is not None:
            self._remove()
            self._remove = None
            self._trainer.accumulate_grad_batches = self._user_accumulation

    @property
    def batch_assignment(self) -> BatchAssignment:
        """The assignment that newcomers, and these ranks after a loss, go on from."""
        return BatchAssignment(
            global_batch=self._global_batch,
            accumulation=self._first_accumulation or self._user_accumulation,
            num_ranks=self._num_ranks,
            position=self._position,
        )

    def assign(self, loader: Any, rank: int, num_ranks: int) -> None:
        """Have a loader yield this rank's batches from the position on; the trainer accumulates."""
        if self._remove is not None:
            self._remove()  # the loader may be the same one
        order = find_order(loader, settings.global_seed())
        rank_batch, drop_last = batches_asked_for(loader)
        assigns: dict[str, Any] = {"rank_batch": rank_batch, "rank": rank, "num_ranks": num_ranks}
        if self._scaling is not None:
            assigns |= {"accumulation": self._user_accumulation, "drop_last": drop_last}
            self._first_accumulation = self._user_accumulation
        else:
            first_batch = rank_batch * self._first_ranks
            self._asked_batch = self._global_batch_size or first_batch * self._user_accumulation
            if self._global_batch is None:
                self._global_batch = self._asked_batch
            if self._first_accumulation is None:
                self._first_accumulation = num_parts(self._global_batch, first_batch)
            limit = self._trainer.limit_train_batches if self._limit is None else self._limit
            assigns["global_batch"] = self._global_batch
            assigns["max_samples"] = self._max_samples(len(order), limit, drop_last)
            assigns["drop_last"] = drop_last and len(order) < self._first_batch  # all of it
        assigns["step_batches"] = self._step_batches
        assigns["in_order"] = self._in_order
        self._sampler = ElasticBatchSampler(order, **assigns)
        if self._in_order:
            self._check_whole_steps(self._sampler)
        self._num_ranks = num_ranks
        epoch = epoch_of_samplers(self._trainer)
        is_present = self._position.epoch == epoch  # else the loader was made anew between epochs
        order.take_up(self._position if is_present else Position(epoch=epoch))
        self._remove = install(loader, self._sampler)
        self._trainer.accumulate_grad_batches = self._sampler.accumulation

    def _check_whole_steps(self, sampler: ElasticBatchSampler) -> None:
        """Refuse an epoch, or a step, whose last micro-batch has fewer samples."""
        step, size = sampler.global_batch, sampler.rank_batch
        if step % size or sampler.num_samples % step:
            raise ConfigError(
                f"same_bits=True, but an epoch has {sampler.num_samples} samples in steps of "
                f"{step} and micro-batches of {size}, expected whole ones. Pass global_batch_size, "
                f"DataLoader(..., drop_last=True) or limit_train_batches."
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on all ranks, where they are dealt by their numbers."""
        assert self._sampler is not None
        return self._sampler.global_batch // self._sampler.rank_batch

    def _max_samples(self, num_samples: int, limit: float | None, drop_last: bool) -> int | None:
        """Return the samples of an epoch, by batches of the first ranks; None where it has all."""
        batch = self._first_batch
        full = num_samples // batch if drop_last else num_parts(num_samples, batch)
        counted = min(limit, full) if isinstance(limit, int) else int(full * (limit or 0.0))
        if full and limit and not counted:
            raise ConfigError(
                f"limit_train_batches={limit} of {full} batches is less than one, expected at "
                f"least {1 / full:.2g}."
            )
        samples = min(counted * batch, num_samples)
        return samples if 0 < samples < num_samples else None

    @property
    def _step_batches(self) -> int:
        """The batches that one device would accumulate; `global_batch_size` says it in samples."""
        if self._global_batch_size is not None:
            return self._user_accumulation
        return self._first_accumulation or self._user_accumulation

    @property
    def _first_batch(self) -> int:
        """Samples that the first ranks took together at once."""
        assert self._global_batch is not None
        assert self._first_accumulation is not None
        return max(1, self._global_batch // self._first_accumulation)

    def check_alike(self, collectives: Collectives) -> None:
        """Raise unless all ranks would assign the same order; each must call."""
        assert self._sampler is not None
        orders = collectives.all_gather_object(self._sampler.sampler.fingerprint())
        strangers = [rank for rank, order in enumerate(orders) if order != orders[0]]
        if not strangers:
            return
        what = f"the ranks {strangers} would train on the samples in another order than rank 0"
        if self._has_taken_over and collectives.rank not in strangers:
            raise RankFailedError(f"Rank {collectives.rank}: {what}, and so take no part.")
        raise ConfigError(
            f"Rank {collectives.rank}: {what}, so that some would be seen twice. Call "
            f"seed_everything(seed) with one seed on all ranks, newcomers included, and give "
            f"them the same dataset and sampler."
        )

    def take_over(self, batch_assignment: BatchAssignment, num_ranks: int) -> None:
        """Go on from where others, or this rank, were; before the loader is asked for anew."""
        self._global_batch = batch_assignment.global_batch
        self._position = batch_assignment.position
        self._first_accumulation = batch_assignment.accumulation
        self._noted_step = self._trainer.global_step
        self._has_taken_over = True
        self._rescale(batch_assignment.num_ranks, num_ranks)

    def _rescale(self, old_ranks: int, num_ranks: int) -> None:
        if self._scaling is not None and old_ranks != num_ranks:
            schedulers = [one.scheduler for one in self._trainer.lr_scheduler_configs]
            rescale(self._trainer.optimizers, schedulers, old_ranks, num_ranks, self._scaling)

    def recount(self, old_accumulation: int) -> None:
        """Count the epoch's batches as if they had been of the present size."""
        first = self._first_batches() if self._scaling is None else None
        recount(self._trainer, first, old_accumulation)
        if epoch_of_samplers(self._trainer) == self._position.epoch:
            recount_epoch(self._trainer, self._position.steps)

    @contextmanager
    def assigning_batches(self) -> Iterator[None]:
        """Let the loader be made, whose limits and intervals count batches of the first ranks."""
        interval, limit = val_check_interval(self._trainer), self._trainer.limit_train_batches
        counts_anew = isinstance(interval, int) and self._first_accumulation is not None
        if self._scaling is None and limit:
            self._limit, self._trainer.limit_train_batches = limit, 1.0
        if counts_anew:
            self._trainer.val_check_interval = 1.0
        try:
            yield
        finally:
            self._limit, self._trainer.limit_train_batches = None, limit
            if counts_anew and interval is not None:
                self._trainer.val_check_interval = self._trainer.val_check_batch = interval

    def counting_steps(self) -> AbstractContextManager[None]:
        """Return a context in which the same is due behind a step as for the first ranks."""
        is_alike = self._trainer.accumulate_grad_batches == self._first_accumulation
        if self._sampler is None or is_alike:
            return nullcontext()
        return counting_steps(self._trainer, self._first_batches())

    def _first_batches(self) -> "FirstBatches":
        assert self._sampler is not None
        assert self._first_accumulation is not None
        epoch = epoch_of_samplers(self._trainer)
        steps = self._position.steps if self._position.epoch == epoch else 0
        return FirstBatches(
            accumulation=self._first_accumulation,
            in_epoch=num_parts(self._sampler.num_samples, self._first_batch),
            epoch=epoch,
            steps=steps + self._has_unnoted_step,
        )

    @property
    def _has_unnoted_step(self) -> bool:
        """Whether the last optimizer step has been made, but its boundary is still to come."""
        return self._trainer.global_step > self._noted_step

    def note_step(self, epoch: int, global_step: int) -> None:
        """Take note of an optimizer step."""
        self._position, self._noted_step = self._position_behind(epoch), global_step

    def _position_behind(self, epoch: int) -> Position:
        assert self._sampler is not None
        steps = self._position.steps if self._position.epoch == epoch else 0
        return self._sampler.position(steps + 1)

    def weight(self, batch_idx: int) -> float:
        """Return the factor of the mean loss of this rank's batch, 1.0 where all are alike."""
        return 1.0 if self._sampler is None else self._sampler.weight_of_batch(batch_idx)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, which may be saved between a step and its boundary."""
        position = self._position
        if self._sampler is not None and self._has_unnoted_step:
            epoch = epoch_of_samplers(self._trainer)
            position = self._position_behind(epoch)
        return {
            **vars(self.batch_assignment),
            "position": vars(position),
            "batches_per_step": self._trainer.accumulate_grad_batches,
        }

    def load_state(self, state: Mapping[str, Any], global_step: int) -> None:
        """Go on from a checkpoint, at whatever number of ranks; `recount_loaded` comes later."""
        wanted = self._global_batch_size
        self._global_batch = wanted or state["global_batch"]
        is_same = self._global_batch == state["global_batch"]
        self._first_accumulation = state["accumulation"] if is_same else None
        self._position = Position(**state["position"])
        self._noted_step, self._loaded_accumulation = global_step, state["batches_per_step"]
        self._loaded_ranks = state["num_ranks"]

    def recount_loaded(self) -> None:
        """Count batches anew after a checkpoint, when the loader is there: see `recount`."""
        if self._loaded_accumulation is None:
            return
        self.recount(self._loaded_accumulation)
        self._rescale(self._loaded_ranks, self._num_ranks)
        self._loaded_accumulation, self._is_resumed = None, True
        if self._asked_batch and self._asked_batch != self._global_batch:
            rank_zero_warn(
                f"The checkpoint was saved with {self._global_batch} samples in an optimizer step, "
                f"and the fit goes on with them; devices x num_nodes = {self._first_ranks} ranks "
                f"would make {self._asked_batch}. For these pass "
                f"global_batch_size={self._asked_batch}."
            )

    def begin(self, started_by: str | None) -> None:
        """Say at a job's beginning on what ranks its steps are based; each rank must call.

        Learning rates that follow the number of ranks are for all that were asked for. `started_by`
        says who has started all ranks that there are, and may start more later, if anybody.
        """
        if self._is_resumed:
            return
        here, asked, holds = self._num_ranks, self._first_ranks, self._scaling is None
        self._rescale(asked, here)
        if here != asked:
            rank_zero_warn(
                f"{here} of {asked} ranks (devices x num_nodes) take part. A step holds "
                f"{self._global_batch or 'fewer'} samples, those of {asked if holds else here}: "
                f"each rank accumulates {self._trainer.accumulate_grad_batches} batches."
            )
        elif started_by and holds and not self._global_batch_size:
            rank_zero_warn(
                f"An optimizer step has {self._global_batch} samples, those of {asked} ranks, "
                f"which {started_by} has started, and keeps them when more come: pass "
                f"global_batch_size={self._global_batch}, or what it is to be."
            )


_NEVER = 1 << 62  # batches


@dataclass(frozen=True, kw_only=True)
class FirstBatches:
    """How far training is, in batches of the first ranks."""

    accumulation: int
    in_epoch: int
    epoch: int
    steps: int

    @property
    def before(self) -> int:
        """Batches of this epoch before the last step."""
        return self._until(max(self.steps - 1, 0))

    @property
    def behind(self) -> int:
        """Batches of this epoch until now."""
        return self._until(self.steps)

    @property
    def of_epochs(self) -> int:
        """Batches of the epochs before."""
        return self.epoch * self.in_epoch

    def _until(self, steps: int) -> int:
        return min(steps * self.accumulation, self.in_epoch)


@contextmanager
def counting_steps(trainer: "pl.Trainer", first: FirstBatches) -> Iterator[None]:
    """Inside, what goes by batches is due behind the same steps as for the first ranks."""
    check, configs = trainer.val_check_batch, trainer.lr_scheduler_configs
    frequencies = [one.frequency for one in configs]
    interval = val_check_interval(trainer)
    if interval is not None:
        trainer.val_check_batch = 1 if _validates(trainer, first, interval) else _NEVER
    for one in configs:
        if one.interval == "step":
            one.frequency = 1 if first.behind % one.frequency == 0 else _NEVER
    try:
        yield
    finally:
        trainer.val_check_batch = check
        for one, frequency in zip(configs, frequencies, strict=True):
            one.frequency = frequency


def _validates(trainer: "pl.Trainer", first: FirstBatches, interval: float) -> bool:
    if is_within_step(trainer):
        return False
    if isinstance(interval, float):
        interval = max(1, int(first.in_epoch * interval))
    since = first.of_epochs if trainer.check_val_every_n_epoch is None else 0
    return (since + first.behind) // interval > (since + first.before) // interval


def recount(trainer: "pl.Trainer", first: FirstBatches | None, old_accumulation: int) -> None:
    """Count all batches until now as if they had been of the present size."""
    accumulation = trainer.accumulate_grad_batches
    progress = trainer.fit_loop.epoch_loop.batch_progress
    total = -(-progress.total.ready * accumulation // old_accumulation)
    if first is not None:
        batches = first.of_epochs + first.behind
        total = -(-batches * accumulation // first.accumulation)
    # what is not completed stays so; of the total a batch that was skipped would be one
    num_open = int(progress.current.ready > progress.current.completed)
    current = -(-progress.current.ready * accumulation // old_accumulation)
    _set_count(progress.total, total, num_open)
    _set_count(progress.current, current, num_open)


def recount_epoch(trainer: "pl.Trainer", steps: int) -> None:
    """Count the batches of so many steps of the present epoch, all of them complete."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    num_open = int(current.ready > current.completed)
    _set_count(current, steps * trainer.accumulate_grad_batches, num_open)


def _set_count(progress: Any, number: int, num_open: int) -> None:
    progress.ready = progress.started = progress.processed = number
    progress.completed = max(number - num_open, 0)
