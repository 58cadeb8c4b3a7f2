"""Lightning's counts of batches, where a step has another number of them than for the first ranks.

What goes by batches is due behind the same steps, here a validation after every third one:

    4 ranks    0 1 2 v 3 4 5 v 6                      1 batch a step
    3 ranks    0 0 1 1 2 2 v 3 3 4 4 5 5 v 6          2 batches a step
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_shard.elastic._lightning import is_within_step, val_check_interval

_NEVER = 1 << 62  # batches


@dataclass(frozen=True, kw_only=True)
class FirstBatches:
    """How far training is, in batches of the first ranks.

    Attributes:
        accumulation: The batches that the first ranks accumulate for a step.
        in_epoch: The batches that an epoch has for them.
        epoch: The number of the epoch, from 0.
        steps: The optimizer steps of this epoch that have been made.
    """

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
    """Count all batches until now as if they had been of the present size.

    Args:
        trainer: In its fit.
        first: How far training is; None where a step has as many batches at every number of ranks.
        old_accumulation: How many batches a step had when they were counted.
    """
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
