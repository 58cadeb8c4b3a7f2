"""The samples of an epoch that each rank gets, and their weights: pure arithmetic.

    an epoch's order    0 1 2 3 4 5 6 7 8 9 | 10 11 12 13 ...
                        step 0              | step 1                  10 samples a step, always

    step 0, at most     microbatch 0        microbatch 1
    3 at once           0 1 2 3 4 5         6 7 8 9
      2 ranks           rank 0: 0 2 4       rank 0: 6 8
                        rank 1: 1 3 5       rank 1: 7 9
      4 ranks           rank 0: 0 4 8    rank 1: 1 5 9    rank 2: 2 6    rank 3: 3 7

Which samples a step holds depends on the step alone, how they are assigned on the number of ranks.
So ranks may come and go between two steps, and the mean over the step stays what it was. Where all
shares are equal, they are those of torch's DistributedSampler with batches of this size.

An epoch's last step may have fewer of the user's batches than are accumulated. Lightning divides
it by as many as a whole step has, and so its mean counts for that share of a whole step.
"""

from dataclasses import dataclass

from lightning_shard.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """One optimizer step's samples, assigned to ranks and microbatches.

    Each rank has the same number of microbatches, since stages 2 and 3 meet in each backward. Sizes
    differ by one at most. With fewer samples than ranks, or with one sample at once, some
    microbatches have none: they borrow one, which counts for nothing.

    Attributes:
        num_samples: R, the samples of the step, at least 1.
        num_ranks: W, the number of ranks.
        rank_batch: The most samples at once on a rank.
        accumulation: A, by which the loop divides each loss; the microbatches of a whole step.
        num_batches: K, the user's batches in this step.
        whole_batches: B, the user's batches in a whole step.
    """

    num_samples: int
    num_ranks: int
    rank_batch: int
    accumulation: int
    num_batches: int = 1
    whole_batches: int = 1

    @property
    def num_microbatches(self) -> int:
        """The microbatches of this step: as few as can be, at most `accumulation`."""
        return num_parts(self.num_samples, self.num_ranks * self.rank_batch)

    def size(self, microbatch: int, rank: int) -> int:
        """Return the samples of a microbatch that count, 0 where its only one is borrowed."""
        share = microbatch * self.num_ranks + rank
        even, surplus = divmod(self.num_samples, self.num_microbatches * self.num_ranks)
        return even + (share < surplus)

    def places(self, microbatch: int, rank: int) -> range:
        """Return the places in the step, from 0, of a microbatch's samples; never empty."""
        if self.size(microbatch, rank) == 0:
            borrowed = rank % self.num_samples
            return range(borrowed, borrowed + 1)
        first = self._begin(microbatch)
        return range(first + rank, self._begin(microbatch + 1), self.num_ranks)

    def weight(self, microbatch: int, rank: int) -> float:
        """Return the factor by which a rank multiplies the mean loss of a microbatch.

        Returns:
            n * W * A / R * K / B for n samples that count: after a division by A and a mean over
            the ranks the sum over the microbatches is the mean over the step's samples, times
            K / B. Exactly 1 where all are alike.
        """
        counted = self.size(microbatch, rank) * self.num_ranks * self.accumulation
        return counted * self.num_batches / (self.num_samples * self.whole_batches)

    def _begin(self, microbatch: int) -> int:
        """Where the samples of a microbatch begin, those of all ranks."""
        even, surplus = divmod(self.num_samples, self.num_microbatches * self.num_ranks)
        shares = microbatch * self.num_ranks
        return even * shares + min(surplus, shares)


@dataclass(frozen=True, kw_only=True)
class EpochShares:
    """An epoch from where it is taken up, at one number of ranks.

    Attributes:
        num_samples: The samples of the whole epoch.
        step_samples: The samples of one optimizer step, over all ranks.
        num_ranks: W, the number of ranks.
        rank_batch: The most samples at once on a rank.
        drop_last: Leave out the last step where it is smaller than the others.
        samples_done: Where the epoch is taken up, in samples of its order.
        steps_done: The optimizer steps before that, at whatever numbers of ranks.
        step_batches: The batches of a whole step, as the user counts them: what one device would
            accumulate.
    """

    num_samples: int
    step_samples: int
    num_ranks: int
    rank_batch: int
    drop_last: bool = False
    samples_done: int = 0
    steps_done: int = 0
    step_batches: int = 1

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
        """The place in the epoch's order where a step begins: the samples done before it.

        Args:
            step: One that is left, or the one after the last.

        Raises:
            LayoutError: It lies before the one at which the epoch is taken up, or after its end.
        """
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
        """Return how one of the steps that are left is assigned.

        Raises:
            LayoutError: It is not left in this epoch.
        """
        begin, end = self.begin(step), self.begin(step + 1)
        return StepShares(
            num_samples=end - begin,
            num_ranks=self.num_ranks,
            rank_batch=self.rank_batch,
            accumulation=self.accumulation,
            num_batches=num_parts((end - begin) * self.step_batches, self.step_samples),
            whole_batches=self.step_batches,
        )


def num_parts(total: int, size: int) -> int:
    """Return how many parts of at most `size` hold `total`."""
    return -(-total // size)
