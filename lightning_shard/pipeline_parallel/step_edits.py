"""Edits of parameters in a training step, which a pipeline runs once for each microbatch and stage.

    before or in the network    every stage edits its own, in each microbatch: right where doing so
                                again changes nothing (clamp_, a renormalized weight), else refused
    before the backward         the gradients are there already: refused
    after the network           the last stage alone comes there, after its first microbatch has
                                been computed: refused

Edits are found by value, whichever way they take: `EditMarks`. The first batch is watched step by
step, and so are all others once a batch has edited; else a batch's beginning and end are compared.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.core.placeholders import parameters_written
from lightning_shard.data_parallel.content import content, sum_of_bits
from lightning_shard.data_parallel.gradients.gradient_shards import GradientShards
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.errors import ConfigError


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

    Numbers that change when user code edits parameters or gradients, whichever way it takes.

        p.mul_(c)    p.data.clamp_(-c, c)    p.data = ...    p.numpy()[:] = ...    load_state_dict

    Autograd's version counters see the first of these only. So values are compared, by sums over
    their bits: all of a buffer in one pass, or parameter by parameter to find the name.

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


_ADVICE = (
    "Edit parameters and gradients in a hook that comes once per batch: "
    "on_train_batch_start(batch, batch_idx), on_before_optimizer_step(optimizer) or "
    "on_train_batch_end(outputs, batch, batch_idx), where each stage edits its own; or use "
    "strategy='zero2'. "
)


class StepEdits:
    """Watches one rank's parameters through the batches of a pipeline.

    Attributes:
        marks: Reads the marks of the rank's parameters; None while nothing is watched.
    """

    def __init__(self) -> None:
        self.marks: EditMarks | None = None
        self._is_close = True
        self._in_batch = False
        self._known: dict[str, int] = {}
        self._times: Counter[str] = Counter()

    @contextmanager
    def batch(self, *, training: bool) -> Iterator[None]:
        """Run one batch inside.

        Raises:
            ConfigError: Its steps have edited parameters, and not as one step would have.
        """
        if self.marks is None or not training:
            yield
            return
        self._in_batch, self._times = True, Counter()
        before = None
        if self._is_close:
            self._known = self.marks.by_name()
        else:
            before = self.marks.quick()
        try:
            yield
        finally:
            self._in_batch = False
        if before is None:
            self._is_close = bool(self._times)
        elif not before.equal(self.marks.quick()):
            raise ConfigError(
                f"{_ADVICE}training_step has changed parameters of this stage of the pipeline, or "
                f"gradients that are being accumulated, for the first time after the first batch; "
                f"expected it to leave them as they are: it runs for each microbatch."
            )

    @contextmanager
    def step(self, stage: int, trained: Callable[[], Sequence[bool]]) -> Iterator[None]:
        """Run the step of one microbatch on one stage inside.

        Args:
            stage: Number of the stage.
            trained: Returns whether each parameter of the model requires a gradient now.

        Raises:
            ConfigError: It has edited what an earlier step of the batch had edited, or frozen or
                unfrozen parameters.
        """
        before = trained()
        yield
        self.note(stage)
        if self._in_batch and before != trained():
            raise ConfigError(
                f"Stage {stage}: training_step freezes or unfreezes parameters (requires_grad), "
                f"which other stages and microbatches would learn of too late; expected that to "
                f"stay as it is in a step of a pipeline. Do it in "
                f"on_train_batch_start(batch, batch_idx), or use strategy='zero2'."
            )

    def note(self, stage: int) -> None:
        """Count the edits since the last time, at the end of a step or of a trial of one."""
        again = [name for name in self._edited() if self._times[name] > 1]
        if again:
            raise ConfigError(
                f"{_ADVICE}Stage {stage}: training_step changes {_listed(again)} again in each "
                f"microbatch, expected one change per batch."
            )

    @contextmanager
    def leaving(self, stage: int, lent: Sequence[Tensor]) -> Iterator[None]:
        """Run what comes after the network, on the last stage, inside.

        Args:
            stage: Number of the stage.
            lent: Parameters of other stages that it has borrowed.

        Raises:
            ConfigError: It has edited parameters, of this stage or of others.
        """
        if not self._in_batch:
            yield
            return
        self.note(stage)
        before = [sum_of_bits(one) for one in lent]
        with parameters_written() as written:
            yield
        late = [*self._edited(), *map(repr, written)]
        if before and not torch.equal(
            torch.stack(before), torch.stack([sum_of_bits(one) for one in lent])
        ):
            late.append("parameters of other stages that it has borrowed")
        if late:
            raise ConfigError(
                f"{_ADVICE}Stage {stage}: training_step changes {_listed(late)} after the last "
                f"block of the network, where only the last stage of the pipeline comes, once for "
                f"each microbatch; expected parameters to stay as they are there."
            )

    def watched_until_backward(self) -> Callable[[], None]:
        """Return what raises ConfigError if parameters have changed since; for the backward."""
        if self.marks is None:
            return lambda: None
        marks, before = self.marks, self.marks.of_places()

        def check() -> None:
            if marks.of_places() != before:
                raise ConfigError(
                    f"{_ADVICE}Parameters of this stage of the pipeline have changed between "
                    f"training_step and its backward, as in on_before_zero_grad, but a pipeline "
                    f"has computed the gradients by then; expected them to stay as they are."
                )

        return check

    def _edited(self) -> list[str]:
        """Return what has changed since the last time, while a batch is watched closely."""
        if not (self._in_batch and self._is_close and self.marks is not None):
            return []
        before, self._known = self._known, self.marks.by_name()
        edited = [name for name, mark in self._known.items() if before.get(name, mark) != mark]
        self._times.update(edited)
        return edited


def _listed(names: list[str]) -> str:
    shown = list(dict.fromkeys(name.rstrip() for name in names))
    return ", ".join(shown[:3]) + " ..." * (len(shown) > 3)
