"""Runs a module again with one thing changed: on ranks, on one device, on parts of a batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_shard.proving.batches import halves
from lightning_shard.proving.changes import Change, with_state
from lightning_shard.proving.comparison import Comparison, Difference, compare, deviation
from lightning_shard.proving.records import Place, Run
from lightning_shard.proving.runs import Subject

_LOSS = "loss"


class Laboratory:
    """What experiments on one difference work with.

    Args:
        subject: What is proved, in the precision in which the difference was found.
        ranks: The run on ranks.
        alone: The run on one device.
        first: The difference.
        tolerance: Relative deviation that rounding explains.

    Attributes:
        batches: By rank of different samples its batches.
        joined: One device's batches.
    """

    def __init__(
        self, subject: Subject, ranks: Run, alone: Run, first: Difference, tolerance: float
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
        except Exception:  # the changed module may not run at all
            return False
        return not [one for one in found.counting if one.place.kind != "metric"]

    @cached_property
    def alone_again(self) -> Run:
        """One device, to the step of the difference."""
        return self.subject.on_one_device(self.joined)

    def same(self, got: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
        """Whether two values are equal but for rounding."""
        return deviation(got, expected, scale) <= self.tolerance

    @cached_property
    def before(self) -> Change:
        """Gives a module the state that the step of the difference begins with."""
        step = self.first.place.step - 1
        state = {
            place.name: values[-1]
            for place, values in self.alone.records[0].values.items()
            if place.step == step
            and place.phase == "hooks after the update"
            and place.kind in ("weight", "buffer")
        }
        return with_state(state)

    @cached_property
    def one_step(self) -> Subject:
        """The subject for one step of one batch."""
        options = {**self.subject.options, "accumulate_grad_batches": 1}
        return replace(self.subject, num_steps=1, options=options)

    def step_alone(self, batch: Any) -> "Step":
        """Run one step on one device, from the state before the difference."""
        return Step(self.one_step.on_one_device([batch], change=self.before), self.first.place)

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

    @cached_property
    def steps_of_parts(self) -> list["Step"]:
        """One device's step on each of the parts."""
        return [self.step_alone(part) for part in self.parts]

    @cached_property
    def step_of_all(self) -> "Step":
        """One device's step on the whole batch."""
        return self.step_alone(self.joined[self.at])

    @cached_property
    def same_for_all(self) -> Run:
        """One step on the ranks in which each is given the first one's batch."""
        batches = [[self.parts[0]] for _ in self.batches]
        return self.one_step.on_ranks(batches, change=self.before)

    def losses_of_ranks(self, run: Run, step: int = 0, micro: int = 0) -> list[Tensor]:
        """Return each rank's own loss of a batch."""
        place = Place(step, micro, "loss", "loss", _LOSS)
        firsts = [records[0] for records in run.by_data_rank]
        return [one.values[place][-1].double() for one in firsts if place in one.values]

    def repeated(self, parts: Sequence[Any]) -> Tensor | None:
        """Return one device's loss of several batches in one."""
        return self.step_alone(self.subject.join(list(parts))).loss


class Step:
    """One step on one device."""

    def __init__(self, run: Run, place: Place) -> None:
        self.run, self._place = run, place
        self.values = run.records[0].values

    @property
    def loss(self) -> Tensor | None:
        """The loss; None where the step returns none."""
        values = self.values.get(Place(0, 0, "loss", "loss", _LOSS))
        return None if values is None else values[-1].double()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients before clipping, by parameter."""
        return {
            place.name: values[-1].double()
            for place, values in self.values.items()
            if place.phase == "backward"
        }
