"""The batch sampler of elastic training: an epoch's samples, each once, whatever ranks there are.

A position is counted in samples of the epoch's order, by steps that the optimizer has made. What
workers have merely fetched ahead counts for nothing: they are asked anew from the position.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from lightning_shard.elastic.epoch_order import EpochOrder, Position
from lightning_shard.elastic.shares import EpochShares, num_parts
from lightning_shard.errors import ConfigError


class ElasticBatchSampler(Sampler[list[Any]]):
    """This rank's batches of an epoch, from where it is taken up.

    Either the samples of a step are given, and the accumulation follows from the number of ranks;
    or the accumulation is given, and a step has as many samples as all ranks together take.
    """

    def __init__(
        self,
        sampler: EpochOrder,
        *,
        rank_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
        global_batch: int | None = None,
        accumulation: int | None = None,
        drop_last: bool = False,
        max_samples: int | None = None,
        step_batches: int = 1,
        in_order: bool = False,
    ) -> None:
        if (global_batch is None) == (accumulation is None):
            raise ConfigError(
                f"Expected one of global_batch and accumulation, got {global_batch=} and "
                f"{accumulation=}: the one gives the other."
            )
        given = {"rank_batch": rank_batch, "global_batch": global_batch}
        given |= {"accumulation": accumulation, "max_samples": max_samples}
        given |= {"step_batches": step_batches}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        self.sampler = sampler
        self.rank_batch = rank_batch
        self.drop_last = drop_last
        self._max_samples = max_samples
        self._step_batches = step_batches
        self._in_order = in_order  # micro-batches of one size, by their numbers
        self._global_batch = global_batch
        self._accumulation = accumulation
        self.rescale(rank, num_ranks)

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        if self._global_batch is not None:
            return self._global_batch
        assert self._accumulation is not None
        return self.rank_batch * self.num_ranks * self._accumulation

    @property
    def accumulation(self) -> int:
        """Microbatches of an optimizer step on every rank; the Trainer must accumulate as many."""
        return self.shares.accumulation

    @property
    def num_samples(self) -> int:
        """The samples of an epoch; `drop_last` may leave some of them out."""
        length = len(self.sampler)
        return length if self._max_samples is None else min(length, self._max_samples)

    @property
    def holds_global_batch(self) -> bool:
        """Whether a step has as many samples at every number of ranks."""
        return self._global_batch is not None

    @property
    def shares(self) -> EpochShares:
        """The present epoch from where it is taken up, assigned to the present ranks."""
        start = self.sampler.start
        return EpochShares(
            num_samples=self.num_samples,
            step_samples=self.global_batch,
            num_ranks=self.num_ranks,
            rank_batch=self.rank_batch,
            drop_last=self.drop_last,
            samples_done=start.samples,
            steps_done=start.steps,
            step_batches=self._step_batches,
            in_order=self._in_order,
        )

    def rescale(self, rank: int, num_ranks: int) -> None:
        """Assign to another number of ranks from the position on; `resume` says which that is."""
        if not 0 <= rank < num_ranks:
            raise ConfigError(
                f"Rank {rank} of {num_ranks} does not exist, expected 0 <= rank < num_ranks."
            )
        self.rank = rank
        self.num_ranks = num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; has no effect on the present one."""
        self.sampler.set_epoch(epoch)

    def resume(self, epoch: int, samples_done: int, steps_done: int | None = None) -> None:
        """Take an epoch up where others, or this rank, have left it."""
        if steps_done is None:
            steps_done = num_parts(samples_done, self.global_batch)
        self.sampler.take_up(Position(epoch=epoch, samples=samples_done, steps=steps_done))

    def position(self, steps_done: int) -> Position:
        """Where training is after so many optimizer steps of the present epoch."""
        samples = self.shares.begin(steps_done)
        return Position(epoch=self.sampler.epoch, samples=samples, steps=steps_done)

    def weight(self, step_in_epoch: int, microbatch: int, rank: int | None = None) -> float:
        """Return the factor by which a rank scales a microbatch's mean loss."""
        step = self.shares.step(step_in_epoch)
        return step.weight(microbatch, self.rank if rank is None else rank)

    def weight_of_batch(self, batch_in_epoch: int) -> float:
        """Return `weight` of this rank's batch, counted from the epoch's start as `len` counts."""
        step, microbatch = divmod(batch_in_epoch, self.accumulation)
        return self.weight(step, microbatch)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's batches from the position on, of when the first is asked for."""
        order, shares, rank = self.sampler.indices(), self.shares, self.rank
        for step in shares.steps:
            begin, assigned = shares.begin(step), shares.step(step)
            for microbatch in range(assigned.num_microbatches):
                yield [order[begin + place] for place in assigned.places(microbatch, rank)]

    def __len__(self) -> int:
        """This rank's batches in the epoch: the steps done, as if of this size, and those left."""
        return self.shares.num_batches
