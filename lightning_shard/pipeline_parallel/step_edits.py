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

import torch
from torch import Tensor

from lightning_shard.core.placeholders import parameters_written
from lightning_shard.data_parallel.content import sum_of_bits
from lightning_shard.data_parallel.gradients.edit_marks import EditMarks
from lightning_shard.errors import ConfigError

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
