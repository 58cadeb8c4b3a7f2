"""The samples of an epoch that each rank gets, and their weights: pure arithmetic.

    an epoch's order    0 1 2 3 4 5 6 7 8 9 | 10 11 12 13 ...
                        step 0              | step 1                  10 samples a step, always

    step 0, at most     microbatch 0        microbatch 1
    3 at once           0 1 2 3 4 5         6 7 8 9
      2 ranks           rank 0: 0 2 4       rank 0: 6 8
                        rank 1: 1 3 5       rank 1: 7 9
      4 ranks           rank 0: 0 4 8    rank 1: 1 5 9    rank 2: 2 6    rank 3: 3 7

Which samples a step holds depends on the step alone, so ranks may come and go between two steps.
Equal shares are those of torch's DistributedSampler. Lightning divides an epoch's last step by as
many batches as a whole step has, and each batch is a mean: the last one has shares of its own.

    8 + 4 samples, at most 4 at once    microbatch 0          microbatch 1
      2 ranks                           0 1 2 3 4 5 6 7       8 9 10 11
      4 ranks                           0 1 2 3 4 5 6 7 on ranks 0 and 1, 8 9 10 11 on ranks 2 and 3
"""

from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from lightning_shard.errors import LayoutError


class _RunOfShares(NamedTuple):
    """Batches of a step that count alike, dealt to a run of shares; sizes differ by one at most."""

    first_sample: int
    num_samples: int
    first_share: int
    num_shares: int
    num_batches: int

    def begin(self, share: int) -> int:
        """Return the place in the step where the samples of a share, dealt in a row, begin."""
        even, surplus = divmod(self.num_samples, self.num_shares)
        before = share - self.first_share
        return self.first_sample + even * before + min(surplus, before)

    def size(self, share: int) -> int:
        """Return the number of samples of a share."""
        return self.begin(share + 1) - self.begin(share)


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One optimizer step's samples, assigned to ranks and microbatches.

    Each rank has the same number of microbatches, since stages 2 and 3 meet in each backward. With
    fewer samples than ranks, or with one sample at once, some microbatches have none: they borrow
    one, which counts for nothing.
    """

    num_samples: int
    num_ranks: int
    rank_batch: int
    accumulation: int
    num_batches: int = 1
    whole_batches: int = 1
    last_batch: int = 0

    @property
    def num_microbatches(self) -> int:
        """The microbatches of this step: as few as can be, at most `accumulation`."""
        shares = num_parts(self._first_samples, self.rank_batch)
        if self._is_cut:
            shares += num_parts(self.last_batch, self.rank_batch)
        return num_parts(shares, self.num_ranks)

    def size(self, microbatch: int, rank: int) -> int:
        """Return the samples of a microbatch that count, 0 where its only one is borrowed."""
        share = microbatch * self.num_ranks + rank
        return self._run_of(share).size(share)

    def places(self, microbatch: int, rank: int) -> range:
        """Return the places in the step, from 0, of a microbatch's samples; never empty."""
        if self.size(microbatch, rank) == 0:
            borrowed = rank % self.num_samples
            return range(borrowed, borrowed + 1)
        row = microbatch * self.num_ranks
        run = self._run_of(row + rank)
        first = max(row, run.first_share)
        end = min(row + self.num_ranks, run.first_share + run.num_shares)
        return range(run.begin(first) + row + rank - first, run.begin(end), end - first)

    def weight(self, microbatch: int, rank: int) -> float:
        """Return the factor by which a rank multiplies the mean loss of a microbatch."""
        run = self._run_of(microbatch * self.num_ranks + rank)
        counted = self.size(microbatch, rank) * self.num_ranks * self.accumulation
        return counted * run.num_batches / (run.num_samples * self.whole_batches)

    @property
    def _is_cut(self) -> bool:
        """Whether the last batch has shares of its own, which have to be there."""
        parts = (self.num_samples - self.last_batch, self.last_batch)
        needed = sum(num_parts(part, self.rank_batch) for part in parts)
        return bool(self.last_batch) and needed <= self.accumulation * self.num_ranks

    @property
    def _first_samples(self) -> int:
        """The samples before a last batch that counts otherwise."""
        return self.num_samples - self.last_batch if self._is_cut else self.num_samples

    def _run_of(self, share: int) -> _RunOfShares:
        """Return the run of a share: the whole step, or what lies before, or in, its last batch."""
        # The last batch begins with a microbatch where that leaves it shares enough.
        before, total = self._first_samples, self.num_microbatches * self.num_ranks
        if not self._is_cut:
            return _RunOfShares(0, before, 0, total, self.num_batches)
        cut = num_parts(before, self.rank_batch)
        begin = num_parts(cut, self.num_ranks) * self.num_ranks
        if begin + num_parts(self.last_batch, self.rank_batch) <= total:
            cut = begin
        if share >= cut:
            return _RunOfShares(before, self.last_batch, cut, total - cut, 1)
        return _RunOfShares(0, before, 0, cut, self.num_batches - 1)


@dataclass(frozen=True, kw_only=True)
class OrderedShares(StepShares):
    """One optimizer step's micro-batches of one size, by their numbers: r, r + N ... for rank r.

    Those that a rank has beyond the last one have the first one's samples, and count for nothing.
    """

    @property
    @override
    def num_microbatches(self) -> int:
        return self.accumulation

    def _number(self, microbatch: int, rank: int) -> int:
        number = microbatch * self.num_ranks + rank
        return number if number * self.rank_batch < self.num_samples else -1

    @override
    def size(self, microbatch: int, rank: int) -> int:
        return 0 if self._number(microbatch, rank) < 0 else self.rank_batch

    @override
    def places(self, microbatch: int, rank: int) -> range:
        first = max(self._number(microbatch, rank), 0) * self.rank_batch
        return range(first, first + self.rank_batch)

    @override
    def weight(self, microbatch: int, rank: int) -> float:
        return 1.0  # what the engine adds up is divided by their number


@dataclass(frozen=True, kw_only=True)
class EpochShares:
    """An epoch from where it is taken up, at one number of ranks."""

    num_samples: int
    step_samples: int
    num_ranks: int
    rank_batch: int
    drop_last: bool = False
    samples_done: int = 0
    steps_done: int = 0
    step_batches: int = 1
    in_order: bool = False

    @property
    def accumulation(self) -> int:
        """Microbatches of a whole step on every rank."""
        return num_parts(self.step_samples, self.num_ranks * self.rank_batch)

    @property
    def steps(self) -> range:
        """The steps that are left, counted from the epoch's start."""
        left = self.num_samples - self.samples_done
        num_left = left // self.step_samples
        if not self.drop_last:
            num_left = num_parts(left, self.step_samples)
        return range(self.steps_done, self.steps_done + num_left)

    @property
    def num_batches(self) -> int:
        """A rank's batches in this epoch: the steps done, as if of this size, and those left."""
        steps = self.steps
        if not steps:
            return self.steps_done * self.accumulation
        return steps[-1] * self.accumulation + self.step(steps[-1]).num_microbatches

    def begin(self, step: int) -> int:
        """The place in the epoch's order where a step begins: the samples done before it."""
        steps = self.steps
        if not steps.start <= step <= steps.stop:
            raise LayoutError(
                f"Step {step} of the epoch was asked for, expected one of {steps.start} to "
                f"{steps.stop}: the epoch has {self.num_samples} samples, is taken up after "
                f"{self.samples_done} of them and takes {self.step_samples} a step. Was a position "
                f"of another epoch or another size mixed in?"
            )
        place = self.samples_done + (step - self.steps_done) * self.step_samples
        return min(place, self.num_samples)

    def step(self, step: int) -> StepShares:
        """Return how one of the steps that are left is assigned, or raise LayoutError."""
        num_samples = self.begin(step + 1) - self.begin(step)
        batch, odd = divmod(self.step_samples, self.step_batches)
        shares = OrderedShares if self.in_order else StepShares
        return shares(
            num_samples=num_samples,
            num_ranks=self.num_ranks,
            rank_batch=self.rank_batch,
            accumulation=self.accumulation,
            num_batches=num_parts(num_samples * self.step_batches, self.step_samples),
            whole_batches=self.step_batches,
            last_batch=0 if odd or num_samples < batch else num_samples % batch,
        )


def num_parts(total: int, size: int) -> int:
    """Return how many parts of at most `size` hold `total`."""
    return -(-total // size)
