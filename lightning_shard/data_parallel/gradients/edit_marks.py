"""Numbers that change when user code edits parameters or gradients, whichever way it takes.

    p.mul_(c)    p.data.clamp_(-c, c)    p.data = ...    p.numpy()[:] = ...    load_state_dict

Autograd's version counters see the first of these only. So values are compared, by sums over their
bits: all of a buffer in one pass, or parameter by parameter to find the name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.data_parallel.content import content, sum_of_bits
from lightning_shard.data_parallel.gradients.gradient_shards import GradientShards
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are


@dataclass(frozen=True, eq=False)
class QuickMarks:
    """The marks of all of a rank's part.

    Attributes:
        sums: For each buffer of parameters its number, shape (), int64.
        num_changes: How often gradients have been changed in place.
        grads: For each parameter what stands in `.grad`.
    """

    sums: Sequence[Tensor]
    num_changes: int
    grads: Sequence[object]

    def equal(self, other: "QuickMarks") -> bool:
        """Whether nothing was edited between the two."""
        are_same = all(one is two for one, two in zip(self.grads, other.grads, strict=True))
        if not are_same or self.num_changes != other.num_changes:
            return False
        if len(self.sums) != len(other.sums):
            return False
        return not self.sums or torch.equal(*(torch.stack(list(o.sums)) for o in (self, other)))


class EditMarks:
    """Reads the marks of one rank's part of a model.

    Args:
        flats: All buffers of parameters.
        shards: The gradients that are to be marked, too; None for none, as where a step's are
            zeroed before the next one's.
    """

    def __init__(self, flats: Sequence[FlatParameters], shards: GradientShards | None) -> None:
        self._flats, self._shards = flats, shards
        self._kept: list[object] = []
        self._exchanged: dict[str, int] = {}  # how often another tensor has come into `.grad`

    @as_they_are
    @torch.no_grad()
    def quick(self) -> QuickMarks:
        """Return one number for each buffer, and what stands in each `.grad`."""
        sums = [sum_of_bits(part) for flat in self._flats for part in flat.shown_parts()]
        return QuickMarks(sums, self._num_changes, [_what_is(grad) for _, grad in self._grads()])

    @as_they_are
    @torch.no_grad()
    def of_places(self) -> list[int]:
        """Return numbers that change when parameters exchange their values, too; slower."""
        return [int(content(part)) for flat in self._flats for part in flat.shown_parts()]

    @as_they_are
    @torch.no_grad()
    def by_name(self) -> dict[str, int]:
        """Return a number for each parameter and for its gradient."""
        marks = {}
        for flat in self._flats:
            for slot, value in zip(flat.layout.slots, flat.own_values(), strict=True):
                marks[repr(slot.name)] = content(value)
        numbers = {name: int(mark) for name, mark in marks.items()}
        numbers["gradients"] = self._num_changes
        self._kept, before = [_what_is(grad) for _, grad in self._grads()], self._kept
        for number, (name, _) in enumerate(self._grads()):
            is_same = not before or before[number] is self._kept[number]
            self._exchanged[name] = self._exchanged.get(name, 0) + (not is_same)
            numbers[f"the gradient of {name!r}"] = self._exchanged[name]
        return numbers

    @property
    def _num_changes(self) -> int:
        return 0 if self._shards is None else self._shards.num_changes

    def _grads(self) -> Iterator[tuple[str, Tensor | None]]:
        for flat in self._flats if self._shards is not None else ():
            for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                yield slot.name, param.grad


def _what_is(grad: Tensor | None) -> object:
    """Return the tensor itself, or the class of the engine's own stand-ins."""
    is_engines = isinstance(grad, AveragedGradient) and grad.own is None
    return AveragedGradient if is_engines else grad
