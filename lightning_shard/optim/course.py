"""What a step of an optimizer makes of a whole and of its parts: updates, and what it keeps.

An update by 1e-8 of a weight of 1 tells of a norm as well as a large one does, and so does a number
that is not used yet: whoever keeps a sum over all elements will divide by it some steps later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import trial_optimizer

Parts = Callable[[Tensor], list[list[Tensor]]]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

_RELATIVE = 1e-5  # of what is compared
_ROUNDING = {True: 3e-7, False: 1e-15}  # of a value, where a step has written float32, and else


@dataclass(frozen=True)
class OptimizerSnapshot:
    """What optimizers hold after a step, or before the first; several are parts of one.

    Attributes:
        values: All elements of the parameters, in order, shape (n,), float64.
        elements: State by its name, of all elements in order: moments, slow weights.
        numbers: Numbers by name, of each parameter, or of each optimizer: D-Adaptation's `d`.
    """

    values: Tensor
    elements: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Tensor] = field(default_factory=dict)


def snapshot(runs: Sequence[Optimizer]) -> OptimizerSnapshot:
    """Return what optimizers hold now, each of which has one group."""
    elements: dict[str, list[Tensor]] = {}
    numbers: dict[str, list[Tensor]] = {}
    values = []
    for run in runs:
        for param in run.param_groups[0]["params"]:
            values.append(_flat(param))
            for name, value in run.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.ndim:
                    _add(elements, name, value)
                else:
                    _add(numbers, name, value)
        for name, value in _own(run):
            _add(numbers, name, value)
    joined = ({name: torch.cat(held) for name, held in one.items()} for one in (elements, numbers))
    return OptimizerSnapshot(torch.cat(values), *joined)


def _own(run: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps that is no parameter's."""
    group = run.param_groups[0]
    others = {key: value for key, value in run.state.items() if not isinstance(key, Tensor)}
    for place, held in (("group", group), ("optimizer", vars(run)), ("state", others)):
        for name, value in held.items():
            entries = value if place == "state" and isinstance(value, dict) else {"": value}
            for entry, one in entries.items():
                yield f"{place} {name} {entry}", one


def _add(found: dict[str, list[Tensor]], name: Any, value: Any) -> None:
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse:
        found.setdefault(str(name), []).append(_flat(value))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64, copy=True).flatten()


@dataclass(frozen=True)
class Step:
    """One step of a whole, or of its parts."""

    before: OptimizerSnapshot
    after: OptimizerSnapshot

    @property
    def update(self) -> Tensor:
        """The change of each element."""
        return self.after.values - self.before.values

    @property
    def is_finite(self) -> bool:
        """Whether the step has led to numbers."""
        return bool(self.update.isfinite().all())

    @property
    def rounding(self) -> float:
        """By how much elements may differ that were computed alike."""
        written = self.after.values
        is_narrow = torch.equal(written, written.float().double())
        return _ROUNDING[is_narrow] * float(self.before.values.abs().max())


class TrialError(Exception):
    """What an optimizer has raised in a trial, and nothing else has; of parts if no whole did."""

    def __init__(self, cause: Exception, *, of_parts: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.of_parts = of_parts


class Runs:
    """Trials of an optimizer on a whole and on its parts, which take the same steps."""

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], parts: Parts, weight: Tensor
    ) -> None:
        def make(_: int, values: Sequence[Tensor]) -> None:
            params = [torch.nn.Parameter(value.clone()) for value in values]
            self.optimizers.append(trial_optimizer(optimizer, {**options, "params": params}))

        self.optimizers: list[Optimizer] = []
        self._step: Callable[..., Any] = type(optimizer).step
        self._parts, self._weight = parts, weight
        self._in_each(weight, make)
        self._held = self._snapshots()

    def step(self, grad: Tensor, loss: Loss | None) -> tuple["Step", "Step"]:
        """Take a step on the whole, which has this gradient, and on its parts; return both.

        `loss` is what a closure returns that steps are given; None gives them none.
        """

        def take(number: int, grads: Sequence[Tensor]) -> None:
            run = self.optimizers[number]
            params = run.param_groups[0]["params"]

            def closure() -> Tensor:
                for param, one in zip(params, grads, strict=True):
                    param.grad = one.clone()
                return (loss or same_loss)(params, grads)

            closure()
            self._step(run, *([] if loss is None else [closure]))

        self._in_each(grad, take)
        return self._taken()

    def call(self, name: str) -> tuple["Step", "Step"]:
        """Call a method of the whole's optimizer and of the parts'; see `step`."""
        self._in_each(self._weight, lambda number, _: getattr(self.optimizers[number], name)())
        return self._taken()

    def _taken(self) -> tuple["Step", "Step"]:
        before, self._held = self._held, self._snapshots()
        whole, parts = (Step(*one) for one in zip(before, self._held, strict=True))
        return whole, parts

    def _in_each(self, tensor: Tensor, do: Callable[[int, Sequence[Tensor]], None]) -> None:
        for number, one in enumerate(self._parts(tensor)):
            try:
                do(number, one)
            except Exception as error:  # an optimizer raises what it likes
                raise TrialError(error, of_parts=number > 0) from error

    def _snapshots(self) -> list[OptimizerSnapshot]:
        """Return what the whole holds, and what the parts do."""
        return [snapshot(self.optimizers[:1]), snapshot(self.optimizers[1:])]


def same_loss(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss that is the same on all ranks, as an optimizer is given it (`mean_loss`)."""
    return params[0].new_ones(())


def are_steps_alike(whole: Step, parts: Step) -> bool:
    """Whether parts were changed as the whole was, and keep what it keeps, but for rounding."""
    expected, got = whole.update, parts.update
    if not (whole.is_finite and parts.is_finite):
        return torch.equal(expected.isfinite(), got.isfinite())
    if not _are_close(got, expected, whole.rounding):
        return False
    both = whole.after.elements.keys() & parts.after.elements.keys()
    held = [(parts.after.elements[name], whole.after.elements[name]) for name in both]
    if not all(_are_close(*one, 1e-12) for one in held if len(one[0]) == len(one[1])):
        return False
    pairs = ((one, parts.after.numbers.get(key)) for key, one in whole.after.numbers.items())
    return all(other is None or _are_numbers_alike(other, one) for one, other in pairs)


def _are_numbers_alike(got: Tensor, expected: Tensor) -> bool:
    """Whether numbers are the same; those of one whole parameter are those of each part."""
    if len(expected) not in (1, len(got)):
        return True  # vectors, of rows say: what is made of them shows in the updates
    return all(
        _are_close(one.view(1), other.view(1), 1e-15)
        for one, other in zip(got, expected.expand(len(got)), strict=True)
    )


def _are_close(got: Tensor, expected: Tensor, smallest: float) -> bool:
    finite = expected[expected.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    atol = _RELATIVE * most + smallest
    return torch.allclose(got, expected, rtol=_RELATIVE, atol=atol, equal_nan=True)
