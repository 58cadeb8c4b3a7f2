"""The training data of an elastic run: dealt to the ranks of the moment, each sample once.

    global batch held      24 samples a step:  4 ranks x 6        3 ranks x 8 = 2 x 4 accumulated
    batch per rank held    24 samples a step on 4 ranks, 18 on 3, with a smaller learning rate

How a step's samples are shared out: see `shares`.
"""

from collections.abc import Mapping
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
from lightning_shard.errors import ConfigError, RankFailedError


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
        holds_global = self._scaling is None
        if holds_global and self._global_batch is None:
            self._global_batch = rank_batch * num_ranks * self._user_accumulation
        self._sampler = ElasticBatchSampler(
            order,
            rank_batch=rank_batch,
            rank=rank,
            num_ranks=num_ranks,
            global_batch=self._global_batch if holds_global else None,
            accumulation=None if holds_global else self._user_accumulation,
            drop_last=loader.drop_last,
        )
        self._num_ranks = num_ranks
        self._resume(self._position)
        self._installed = install(loader, self._sampler)
        accumulation = self._sampler.accumulation
        if self._first_accumulation is None:
            self._first_accumulation = accumulation
        trainer.accumulate_grad_batches = accumulation

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
        if self._scaling is not None and diet.num_ranks != num_ranks:
            schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
            rescale(trainer.optimizers, schedulers, diet.num_ranks, num_ranks, self._scaling)

    def recount(self, trainer: "pl.Trainer", old_accumulation: int) -> None:
        """Count the epoch's batches as if they had been of the present size.

        Args:
            trainer: In its fit, after the loader was asked for anew.
            old_accumulation: When they were counted.
        """
        accumulation = trainer.accumulate_grad_batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        epoch = epoch_of_samplers(trainer)
        _recount(progress.total, accumulation, old_accumulation)
        _recount(progress.current, accumulation, old_accumulation)
        if epoch == self._position.epoch:
            _set_count(progress.current, self._position.steps * accumulation)
        interval = trainer.val_check_interval
        if isinstance(interval, int) and self._first_accumulation is not None:
            trainer.val_check_batch = max(1, interval * accumulation // self._first_accumulation)

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
        self._global_batch = state["global_batch"]
        self._first_accumulation = state["accumulation"]
        self._position = Position(**state["position"])
        self._noted_step, self._loaded_accumulation = global_step, state["batches_per_step"]

    def recount_loaded(self, trainer: "pl.Trainer") -> None:
        """After a checkpoint, when the loader is there: see `recount`."""
        if self._loaded_accumulation is not None:
            self.recount(trainer, self._loaded_accumulation)
            self._loaded_accumulation = None


def _recount(progress: Any, accumulation: int, old_accumulation: int) -> None:
    _set_count(progress, -(-progress.ready * accumulation // old_accumulation))


def _set_count(progress: Any, number: int) -> None:
    """Set Lightning's counters of batches; what is not completed stays so."""
    is_open = progress.ready > progress.completed
    progress.ready = progress.started = progress.processed = number
    progress.completed = max(number - is_open, 0)
