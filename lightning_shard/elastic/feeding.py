"""The training data of an elastic run: dealt to the ranks of the moment, each sample once.

    global batch held      24 samples a step:  4 ranks x 6        3 ranks x 8 = 2 x 4 accumulated
    batch per rank held    24 samples a step on 4 ranks, 18 on 3, with a smaller learning rate

How a step's samples are shared out: see `shares`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_shard import settings
from lightning_shard.backends.collectives import Collectives
from lightning_shard.elastic._lightning import epoch_of_samplers
from lightning_shard.elastic.data_loaders import Installed, find_order, install
from lightning_shard.elastic.epoch_order import Position
from lightning_shard.elastic.learning_rate import rescale
from lightning_shard.elastic.sampling import ElasticBatchSampler
from lightning_shard.elastic.shares import num_parts
from lightning_shard.errors import ConfigError, RankFailedError

_NEVER = 1 << 62  # batches


@dataclass(frozen=True, kw_only=True)
class Diet:
    """How an optimizer step is fed, as the first ranks have settled it; newcomers take it over.

    Attributes:
        global_batch: Samples of an optimizer step; None where each rank's batch is held.
        accumulation: Batches that the first ranks accumulated.
        num_ranks: For which the learning rates are now.
        position: In the data.
    """

    global_batch: int | None
    accumulation: int
    num_ranks: int
    position: Position


class Feeding:
    """Deals one training loader.

    Args:
        global_batch_size: Samples of an optimizer step; None for what the first ranks have.
        scaling: Hold each rank's batch and scale the learning rate; None holds the global batch.

    Raises:
        ConfigError: The two contradict each other.
    """

    def __init__(
        self, global_batch_size: int | None, scaling: Literal["linear", "sqrt"] | None
    ) -> None:
        if global_batch_size is not None and global_batch_size < 1:
            raise ConfigError(f"global_batch_size must be at least 1, got {global_batch_size}.")
        if scaling not in (None, "linear", "sqrt"):
            raise ConfigError(
                f"learning_rate_scaling must be 'linear', 'sqrt' or None, got {scaling!r}."
            )
        if scaling is not None and global_batch_size is not None:
            raise ConfigError(
                f"learning_rate_scaling={scaling!r} lets the global batch change with the ranks, "
                f"but global_batch_size={global_batch_size} holds it. Leave one of them out."
            )
        self._global_batch_size = global_batch_size
        self._scaling = scaling
        self._sampler: ElasticBatchSampler | None = None
        self.begin(None)

    def begin(self, trainer: "pl.Trainer | None") -> None:
        """Forget an earlier fit.

        Args:
            trainer: Of this one.
        """
        self._user_accumulation = 1 if trainer is None else trainer.accumulate_grad_batches
        self._first_accumulation: int | None = None
        self._global_batch = self._global_batch_size
        self._num_ranks = 0
        self._position = Position(epoch=0)
        self._noted_step = 0
        self._has_taken_over = False
        self._loaded_accumulation: int | None = None
        self._loaded_ranks = 0
        self._limit: float | None = None  # the Trainer's, while the loader is made
        self._sampler = None
        self._installed: Installed | None = None

    def end(self, trainer: "pl.Trainer") -> None:
        """Give the loader and the trainer back as they were."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
            trainer.accumulate_grad_batches = self._user_accumulation

    @property
    def diet(self) -> Diet:
        """What newcomers, and these ranks after a loss, go on from."""
        return Diet(
            global_batch=self._global_batch,
            accumulation=self._first_accumulation or self._user_accumulation,
            num_ranks=self._num_ranks,
            position=self._position,
        )

    def deal(self, trainer: "pl.Trainer", loader: Any, rank: int, num_ranks: int) -> None:
        """Have a loader yield this rank's batches from the position on; the trainer accumulates.

        Args:
            trainer: In its fit.
            loader: As Lightning has prepared it.
            rank: This rank's.
            num_ranks: Between which samples are dealt.

        Raises:
            ConfigError: Its samples cannot be dealt.
        """
        order = find_order(loader, settings.global_seed())
        rank_batch = loader.batch_size or getattr(loader.batch_sampler, "rank_batch", 1)
        deals: dict[str, Any] = {"rank_batch": rank_batch, "rank": rank, "num_ranks": num_ranks}
        if self._scaling is not None:
            deals |= {"accumulation": self._user_accumulation, "drop_last": loader.drop_last}
            self._first_accumulation = self._user_accumulation
        else:
            if self._global_batch is None:
                self._global_batch = rank_batch * num_ranks * self._user_accumulation
            if self._first_accumulation is None:
                self._first_accumulation = num_parts(self._global_batch, num_ranks * rank_batch)
            limit = trainer.limit_train_batches if self._limit is None else self._limit
            deals["global_batch"] = self._global_batch
            deals["max_samples"] = self._max_samples(len(order), limit, loader.drop_last)
            deals["drop_last"] = loader.drop_last and len(order) < self._first_batch  # all of it
        self._sampler = ElasticBatchSampler(order, **deals)
        self._num_ranks = num_ranks
        epoch = epoch_of_samplers(trainer)
        is_present = self._position.epoch == epoch  # else the loader was made anew between epochs
        self._resume(self._position if is_present else Position(epoch=epoch))
        self._installed = install(loader, self._sampler)
        trainer.accumulate_grad_batches = self._sampler.accumulation

    def _max_samples(self, num_samples: int, limit: float | None, drop_last: bool) -> int | None:
        """Samples of an epoch, where they are not all.

        Both limits count batches of the first ranks, so that steps hold what they held.

        Args:
            num_samples: Of the dataset.
            limit: The Trainer's `limit_train_batches`.
            drop_last: The loader's.

        Raises:
            ConfigError: The share is of less than a batch.
        """
        batch = self._first_batch
        whole = num_samples // batch if drop_last else num_parts(num_samples, batch)
        counted = min(limit, whole) if isinstance(limit, int) else int(whole * (limit or 0.0))
        if whole and limit and not counted:
            raise ConfigError(
                f"limit_train_batches={limit} of {whole} batches is less than one, expected at "
                f"least {1 / whole:.2g}."
            )
        samples = min(counted * batch, num_samples)
        return samples if 0 < samples < num_samples else None

    @property
    def _first_batch(self) -> int:
        """Samples that the first ranks took together at once."""
        assert self._global_batch is not None
        assert self._first_accumulation is not None
        return max(1, self._global_batch // self._first_accumulation)

    def check_alike(self, collectives: Collectives) -> None:
        """Raise unless all ranks would deal the same order; each must call.

        Raises:
            ConfigError: They would give samples twice, or not at all. Before training on every
                rank; later on those whose order is another than rank 0's, the eldest.
            RankFailedError: The same on the others, which may go on without those.
        """
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

    def _resume(self, position: Position) -> None:
        assert self._sampler is not None
        self._sampler.resume(position.epoch, position.samples, position.steps)

    def take_over(self, trainer: "pl.Trainer", diet: Diet, num_ranks: int) -> None:
        """Go on from where others, or this rank, were; before the loader is asked for anew.

        Args:
            trainer: In its fit, with the optimizers and schedulers of `diet.num_ranks`.
            diet: Of that moment.
            num_ranks: From now on.
        """
        self._global_batch, self._position = diet.global_batch, diet.position
        self._first_accumulation, self._noted_step = diet.accumulation, trainer.global_step
        self._has_taken_over = True
        self._rescale(trainer, diet.num_ranks, num_ranks)

    def _rescale(self, trainer: "pl.Trainer", old_ranks: int, num_ranks: int) -> None:
        if self._scaling is not None and old_ranks != num_ranks:
            schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
            rescale(trainer.optimizers, schedulers, old_ranks, num_ranks, self._scaling)

    def recount(self, trainer: "pl.Trainer", old_accumulation: int) -> None:
        """Count the epoch's batches as if they had been of the present size.

        Args:
            trainer: In its fit, after the loader was asked for anew.
            old_accumulation: When they were counted.
        """
        accumulation = trainer.accumulate_grad_batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        epoch = epoch_of_samplers(trainer)
        if self._scaling is None:
            _, behind, in_epoch = self._first_batches(trainer)
            total = self._as_now(trainer, epoch * in_epoch + behind)
        else:
            total = _recounted(progress.total, accumulation, old_accumulation)
        current = _recounted(progress.current, accumulation, old_accumulation)
        if epoch == self._position.epoch:
            current = self._position.steps * accumulation
        # what is not completed stays so; of the total a batch that was skipped would be one
        num_open = int(progress.current.ready > progress.current.completed)
        _set_count(progress.total, total, num_open)
        _set_count(progress.current, current, num_open)

    @contextmanager
    def dealing(self, trainer: "pl.Trainer") -> Iterator[None]:
        """Let the loader be made, whose batches Lightning is not to count itself.

        Limits are those of the first ranks' batches, and so is what lies between two validations.
        """
        interval, limit = trainer.val_check_interval, trainer.limit_train_batches
        counts_anew = isinstance(interval, int) and self._first_accumulation is not None
        if self._scaling is None and limit:
            self._limit, trainer.limit_train_batches = limit, 1.0
        if counts_anew:
            trainer.val_check_interval = 1.0
        try:
            yield
        finally:
            trainer.val_check_interval, trainer.limit_train_batches = interval, limit
            self._limit = None
            if counts_anew:
                trainer.val_check_batch = interval

    @contextmanager
    def counting_steps(self, trainer: "pl.Trainer") -> Iterator[None]:
        """Let Lightning find due, behind a step, what was due there for the first ranks.

        It counts batches, of which a step may have another number by now.
        """
        interval = trainer.val_check_interval
        same = trainer.accumulate_grad_batches == self._first_accumulation
        if same or self._sampler is None or not isinstance(interval, (int, float)):
            yield
            return
        before, behind, in_epoch = self._first_batches(trainer)
        check, configs = trainer.val_check_batch, trainer.lr_scheduler_configs
        frequencies = [one.frequency for one in configs]
        if isinstance(interval, float):
            interval = max(1, int(in_epoch * interval))
        since = 0
        if trainer.check_val_every_n_epoch is None:  # counts over epochs
            since = epoch_of_samplers(trainer) * in_epoch
        is_due = (since + behind) // interval > (since + before) // interval
        is_due &= not trainer.fit_loop.epoch_loop._should_accumulate()
        trainer.val_check_batch = 1 if is_due else _NEVER
        for one in configs:
            if one.interval == "step":
                one.frequency = 1 if behind % one.frequency == 0 else _NEVER
        try:
            yield
        finally:
            trainer.val_check_batch = check
            for one, frequency in zip(configs, frequencies, strict=True):
                one.frequency = frequency

    def _first_batches(self, trainer: "pl.Trainer") -> tuple[int, int, int]:
        """Batches of the first ranks before the last step, behind it, and in the epoch."""
        assert self._sampler is not None
        assert self._first_accumulation is not None
        in_epoch = num_parts(self._sampler.num_samples, self._first_batch)
        steps = self._steps(trainer)
        before, behind = (
            min(max(number, 0) * self._first_accumulation, in_epoch)
            for number in (steps - 1, steps)
        )
        return before, behind, in_epoch

    def _as_now(self, trainer: "pl.Trainer", first_batches: int) -> int:
        """So many batches of the first ranks in batches of the present ones."""
        assert self._first_accumulation is not None
        return -(-first_batches * trainer.accumulate_grad_batches // self._first_accumulation)

    def _steps(self, trainer: "pl.Trainer") -> int:
        """Optimizer steps of the epoch, the last of which may not have been noted yet."""
        steps = self._position.steps if self._position.epoch == epoch_of_samplers(trainer) else 0
        return steps + (trainer.global_step > self._noted_step)

    def note_step(self, epoch: int, global_step: int) -> None:
        """Take note of an optimizer step.

        Args:
            epoch: In which it was.
            global_step: The steps of the fit that are done.
        """
        self._position, self._noted_step = self._position_behind(epoch, 1), global_step

    def _position_behind(self, epoch: int, num_steps: int) -> Position:
        assert self._sampler is not None
        steps = self._position.steps if self._position.epoch == epoch else 0
        return self._sampler.position(steps + num_steps)

    def weight(self, batch_idx: int) -> float:
        """By what the mean loss of this rank's batch is multiplied, 1.0 where all are alike."""
        return 1.0 if self._sampler is None else self._sampler.weight_of_batch(batch_idx)

    def state(self, trainer: "pl.Trainer") -> dict[str, Any]:
        """For a checkpoint, which may be saved between an optimizer step and its boundary."""
        position = self._position
        if self._sampler is not None and trainer.global_step > self._noted_step:
            epoch = epoch_of_samplers(trainer)
            position = self._position_behind(epoch, 1)
        return {
            **vars(self.diet),
            "position": vars(position),
            "batches_per_step": trainer.accumulate_grad_batches,
        }

    def load_state(self, state: Mapping[str, Any], global_step: int) -> None:
        """Go on from a checkpoint, at whatever number of ranks; `recount_loaded` comes later.

        Args:
            state: What `state` has returned.
            global_step: The checkpoint's.
        """
        wanted = self._global_batch_size
        self._global_batch = wanted or state["global_batch"]
        is_same = self._global_batch == state["global_batch"]
        self._first_accumulation = state["accumulation"] if is_same else None
        self._position = Position(**state["position"])
        self._noted_step, self._loaded_accumulation = global_step, state["batches_per_step"]
        self._loaded_ranks = state["num_ranks"]

    def recount_loaded(self, trainer: "pl.Trainer") -> None:
        """After a checkpoint, when the loader is there: see `recount`."""
        if self._loaded_accumulation is not None:
            self.recount(trainer, self._loaded_accumulation)
            self._rescale(trainer, self._loaded_ranks, self._num_ranks)
            self._loaded_accumulation = None


def _recounted(progress: Any, accumulation: int, old_accumulation: int) -> int:
    ready: int = progress.ready
    return -(-ready * accumulation // old_accumulation)


def _set_count(progress: Any, number: int, num_open: int) -> None:
    """Set Lightning's counters of batches, of which so many are not completed."""
    progress.ready = progress.started = progress.processed = number
    progress.completed = max(number - num_open, 0)
