"""Runs a module again with one thing changed: on ranks, on one device, on parts of a batch.

Each run begins at the beginning, so that the step of the difference finds the weights, the counters
and the buffers that it had; only what is asked about is exchanged.

    batches of ranks    0  1  2          step 2 in question, all ranks on rank 0's batch
      rank 0            a  b  c          a  b  c
      rank 1            d  e  f          d  e  c
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_shard.errors import ShardError
from lightning_shard.tools.proving.changes import Change, without_updates
from lightning_shard.tools.proving.comparison import Comparison, Difference, compare, deviation
from lightning_shard.tools.proving.records import Kind, Phase, Place, Records
from lightning_shard.tools.proving.runs import RunFailedError, Subject, halves

_LOSS: tuple[Phase, Kind, str] = ("loss", "loss", "loss")
_SECOND = Place(1, 0, *_LOSS)


class Laboratory:
    """What experiments on one difference work with."""

    def __init__(
        self, subject: Subject, ranks: Records, alone: Records, first: Difference, tolerance: float
    ) -> None:
        steps = first.place.step + 1
        self.subject = replace(subject, num_steps=min(steps, subject.num_steps))
        self.ranks, self.alone, self.first, self.tolerance = ranks, alone, first, tolerance
        count = self.subject.num_steps * subject.accumulate
        self.batches = [one[:count] for one in ranks.batches]
        self.joined = alone.records[0].batches[:count]

    def compared(self, change: Change, *, subject: Subject | None = None) -> Comparison:
        """Compare ranks with one device, both with a changed module."""
        tried = subject or self.subject
        ranks = tried.on_ranks(self.batches, change=change)
        return compare(ranks, tried.on_one_device(self.joined, change=change), self.tolerance)

    def vanishes(self, change: Change, *, subject: Subject | None = None) -> bool:
        """Whether ranks and one device are equal once a change is made to both."""
        try:
            found = self.compared(change, subject=subject)
        except (RunFailedError, ShardError):  # the changed module may not run at all
            return False
        return not [one for one in found.counting if one.place.kind != "metric"]

    def same(self, got: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
        """Whether two values are equal but for rounding."""
        return deviation(got, expected, scale) <= self.tolerance

    @cached_property
    def alone_again(self) -> Records:
        """One device, to the step of the difference."""
        return self.subject.on_one_device(self.joined)

    @cached_property
    def at(self) -> int:
        """Number of the batch in which the difference is."""
        place = self.first.place
        return min(place.step * self.subject.accumulate + place.micro, len(self.joined) - 1)

    @cached_property
    def parts(self) -> list[Any]:
        """The batch of the difference in parts: those of the ranks, or halves of a common one."""
        if len(self.batches) > 1:
            return [one[self.at] for one in self.batches]
        return halves(self.joined[self.at])

    def loss_of(self, parts: Sequence[Any]) -> Tensor | None:
        """Return one device's loss if it is given these parts in the batch of the difference."""
        batch = self.subject.join(list(parts))
        batches = [*self.joined[: self.at], batch, *self.joined[self.at + 1 :]]
        losses = self.losses(self.subject.on_one_device(batches))
        return losses[0] if losses else None

    @cached_property
    def losses_of_parts(self) -> list[Tensor | None]:
        """One device's loss of each of the parts."""
        return [self.loss_of([part]) for part in self.parts]

    @cached_property
    def loss_of_all(self) -> Tensor | None:
        """One device's loss of the whole batch."""
        losses = self.losses(self.alone)
        return losses[0] if losses else None

    def in_the_step(self, batches: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Return batches with others in the place of those of the step of the difference."""
        first = self.first.place.step * self.subject.accumulate
        return [*batches[:first], *others[first:]]

    @cached_property
    def ranks_as_rank_0(self) -> Records:
        """The ranks, all with rank 0's batches in the step of the difference."""
        alike = [self.in_the_step(one, self.batches[0]) for one in self.batches]
        return self.subject.on_ranks(alike)

    @cached_property
    def alone_as_rank_0(self) -> Records:
        """One device, with rank 0's batches in the step of the difference."""
        return self.subject.on_one_device(self.in_the_step(self.joined, self.batches[0]))

    def are_one_on_same_samples(self) -> bool:
        """Whether ranks that are all given rank 0's samples have one device's value there."""
        place = self.first.place
        got = self.ranks_as_rank_0.records[0].values.get(place)
        expected = self.alone_as_rank_0.records[0].values.get(place)
        both = got is not None and expected is not None
        return both and self.same(got[-1], expected[-1], 1.0)  # type: ignore[index]

    def is_kept_from_earlier_samples(self) -> bool:
        """Whether a loss depends on the samples before it, without any update of weights."""
        one, *others = self.parts
        subject = replace(self.subject.without_accumulation(), num_steps=2)
        losses = [
            self.loss_at(subject.on_one_device([before, one], change=without_updates), _SECOND)
            for before in (one, self.subject.join([one, one]), *others[:1])
        ]
        found = [loss for loss in losses if loss is not None]
        return any(not self.same(loss, found[0], float(found[0].abs())) for loss in found[1:])

    @cached_property
    def is_one_on_same_samples_from_the_start(self) -> bool:
        """Whether ranks with rank 0's samples in every step are one device with these."""
        ranks = self.subject.on_ranks([self.batches[0]] * len(self.batches))
        (expected,) = self.losses(self.subject.on_one_device(self.batches[0]))
        return all(self.same(one, expected) for one in self.losses(ranks))

    @cached_property
    def gradients_of_parts(self) -> list[Tensor | None]:
        """One device's gradient at the difference, of each of the parts alone."""
        if len(self.batches) > 1:
            given = [self.in_the_step(self.joined, one) for one in self.batches]
        else:
            before, after = self.joined[: self.at], self.joined[self.at + 1 :]
            given = [[*before, part, *after] for part in self.parts]
        place = self.first.place
        runs = [self.subject.on_one_device(batches).records[0] for batches in given]
        return [one.values[place][-1] if place in one.values else None for one in runs]

    def losses(self, run: Records) -> list[Tensor]:
        """Return the loss in the batch of the difference of each rank of other samples."""
        place = Place(self.first.place.step, self.first.place.micro, *_LOSS)
        found = [self.loss_at(run, place, rank) for rank in range(len(run.by_data_rank))]
        return [one for one in found if one is not None]

    @staticmethod
    def loss_at(run: Records, place: Place, rank: int = 0) -> Tensor | None:
        """Return the loss in a place of a run, of one of the ranks of other samples."""
        values = run.by_data_rank[rank][0].values.get(place)
        return None if values is None else values[-1].double()
