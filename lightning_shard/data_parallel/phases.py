"""The phase that an engine is in, which says what its parts may do.

    REST ─┬─ STEP ─┬─ BACKWARD          of manual optimization
          │        └─ UPDATE
          ├─ BACKWARD ── APART          a microbatch's, which its blocks' hooks miss
          ├─ UPDATE ── HOOK
          └─ HOOK ── STEP ...           a hook may train, as the learning-rate finder does

A phase lies within others, and what it leaves is the one around it. No part of the engine has a
flag of its own for where the run is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_shard.core.states import Asker, Checks, State, asker, having, setting


class Phase(State):
    """What runs; named are the phases that may begin in one. A failure ends a run in any."""

    REST = "STEP BACKWARD APART UPDATE HOOK OVER"
    STEP = "BACKWARD APART UPDATE HOOK OVER"
    BACKWARD = "APART HOOK OVER"
    APART = "OVER"  # a part of a backward, which its blocks' hooks miss
    UPDATE = "STEP BACKWARD HOOK OVER"  # the optimizer's view, lent or not
    HOOK = "STEP BACKWARD APART UPDATE HOOK OVER"
    OVER = "OVER"  # the engine is off the model; what ends a failed run may find it so


@dataclass(frozen=True, eq=False)
class ValueSource:
    """What a parameter was given: elements of another one."""

    param: nn.Parameter
    positions: Tensor


class UserCode:
    """Knows whether hooks or steps of the user's run on this rank, or what a backward calls."""

    def __init__(self) -> None:
        self.sources: dict[nn.Parameter, ValueSource | None] = {}
        self.runs = self.is_a_loop = self.is_in_backward = False

    @contextmanager
    def running(self, runs: bool = True) -> Iterator[None]:
        """Set `runs` inside, and restore it on leaving."""
        with having(asker, Asker.USER if runs else Asker.ENGINE), setting(self, runs=runs):
            yield


class Phases:
    """The phases that have begun and have not ended."""

    def __init__(self) -> None:
        self.user_code = UserCode()
        self.open: tuple[Phase, ...] = ()

    @property
    def now(self) -> Phase:
        """The innermost phase."""
        return self.open[-1] if self.open else Phase.REST

    def begin(self, phase: Phase) -> None:
        """Note that a phase begins within the one that is now."""
        self.open += (self.now.to(phase),)

    def end(self, phase: Phase) -> None:
        """Note that a phase has ended, also where an error has ended one that it was within."""
        assert phase in self.open or not Checks.are_on, f"{phase} has not begun"
        inner_first = [*reversed(self.open)]
        inner_first.remove(phase)
        self.open = (*reversed(inner_first),)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Run a phase inside."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)
