"""Who runs a step of the user's module: one object, which dimensions wrap or take the place of."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

StepKind = Literal["training", "validation", "test", "predict"]
ModuleStep = Callable[..., Any]
"""Runs the module's step of a kind, in its precision; the first argument is the batch."""


class StepRunner(Protocol):
    """Runs the steps of a run, one for each batch."""

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one step within one of the engine; each rank must call.

        Args:
            kind: Kind of the step, which says what Lightning runs it for.
            step: Runs the module's own step.
            args: Positional arguments of the step, the batch first.
            kwargs: Keyword arguments of the step.

        Returns:
            What the step has returned, or what stands for it on this rank.
        """


class PlainRunner:
    """Runs a step once, on the batch as it is.

    Args:
        engine_step: Makes the engine's step, which each of the module's runs in.
        around_training: Makes what surrounds each training step.
    """

    def __init__(
        self,
        engine_step: Callable[[], AbstractContextManager[None]],
        around_training: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine_step, self._around_training = engine_step, around_training

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one step; see `StepRunner`."""
        around = self._around_training() if kind == "training" else nullcontext()
        with around, self._engine_step():
            return step(*args, **kwargs)


class WrappedRunner:
    """Runs another one's steps with something around them.

    Args:
        inner: Runs the steps.
        around: Makes what surrounds each.
        completed: Makes of what a step has returned what is returned here.
    """

    def __init__(
        self,
        inner: StepRunner,
        around: Callable[[], AbstractContextManager[None]],
        completed: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self._inner, self._around, self._completed = inner, around, completed

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one step; see `StepRunner`."""
        with self._around():
            return self._completed(self._inner.run(kind, step, args, kwargs))
