"""Derivatives that user code takes by a weight are those of one device, or refused by name."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.autograd.functional as old
from torch import Tensor, func, nn

from tests.strategies.data_parallel.test_memory_of_parameters import (
    STRATEGIES,
    Asks,
    AsksInStep,
    Way,
    fit,
    put_into,
    set_in,
    swapped,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    "`torch.jit.script` is deprecated:FutureWarning",
    # torch's own graph of `linearize`
    "Attempted to insert a get_attr Node",
)
Function = Callable[[Tensor], Tensor]


def mixed(weight: Tensor) -> Tensor:
    return (weight @ weight).pow(2).sum()


def cubed(weight: Tensor) -> Tensor:
    return weight.pow(3)


def ones(weight: Tensor) -> Tensor:
    return torch.ones(weight.shape, dtype=weight.dtype)


def dual(function: Function, weight: Tensor) -> Any:
    with forward.dual_level():
        made = forward.make_dual(weight, ones(weight))
        return forward.unpack_dual(function(made)).tangent


def dual_beside(weight: Tensor) -> Any:
    """Take a forward derivative of something else that is computed with the weight."""
    with forward.dual_level():
        made = forward.make_dual(ones(weight), ones(weight))
        return forward.unpack_dual((made @ weight).pow(2).sum()).tangent


def of_called(weight: Tensor) -> Any:
    layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    given = {"weight": weight.detach()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        called: Tensor = func.functional_call(layer, params, (ones(weight),))
        return called.pow(2).sum()

    return func.grad(loss)(given)["weight"]


DERIVATIVES: dict[str, Way] = {
    "old jvp": lambda w: old.jvp(mixed, w.detach(), ones(w))[1],
    "old jvp of a parameter": lambda w: old.jvp(mixed, w, ones(w))[1],
    "old jvp by element": lambda w: old.jvp(cubed, w.detach(), ones(w), create_graph=True)[1],
    "old jvp along it": lambda w: old.jvp(mixed, ones(w), w.detach())[1],
    "old vjp": lambda w: old.vjp(mixed, w)[1],
    "old vjp along it": lambda w: old.vjp(cubed, ones(w), w.detach())[1],
    "old hvp": lambda w: old.hvp(mixed, w.detach(), ones(w))[1],
    "old vhp": lambda w: old.vhp(mixed, w, ones(w))[1],
    "old hessian": lambda w: old.hessian(mixed, w),
    "old hessian by vmap": lambda w: old.hessian(
        mixed, w.detach(), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "old jacobian": lambda w: old.jacobian(cubed, w.detach()),
    "old jacobian by vmap": lambda w: old.jacobian(cubed, w.detach(), vectorize=True),
    "old jacobian forward": lambda w: old.jacobian(
        cubed, w.detach(), strategy="forward-mode", vectorize=True
    ),
    "jvp": lambda w: func.jvp(mixed, (w,), (ones(w),))[1],
    "jvp along it": lambda w: func.jvp(mixed, (ones(w),), (w.detach(),))[1],
    "vjp": lambda w: func.vjp(mixed, w)[1](torch.ones((), dtype=w.dtype))[0],
    "vjp along it": lambda w: func.vjp(cubed, ones(w))[1](w.detach())[0],
    "grad": func.grad(mixed),
    "jacrev": lambda w: func.jacrev(cubed)(w.detach()),
    "jacfwd": func.jacfwd(cubed),
    "hessian": lambda w: func.hessian(mixed)(w.detach()),
    "linearize": lambda w: func.linearize(mixed, w.detach())[1](ones(w)),
    "linearize of a parameter": lambda w: func.linearize(mixed, w)[1](ones(w)),
    "vmap": lambda w: func.vmap(lambda row: row.exp().sum())(w.detach()),
    "functional_call": of_called,
    "jvp beside it": lambda w: func.jvp(lambda x: (x @ w).sum(), (ones(w),), (ones(w),))[1],
    "grad beside it": lambda w: func.grad(lambda x: (x @ w).pow(2).sum())(ones(w)),
    "vmap beside it": lambda w: func.vmap(lambda x: (w @ x).sum())(ones(w)),
    "forward": partial(dual, mixed),
    "forward of a copy": lambda w: dual(cubed, w.detach()),
    "forward beside it": dual_beside,
}
MOVES: dict[str, Way] = {
    "data of another": put_into(lambda w: w.data),
    "data of another, a parameter": put_into(lambda w: w),
    "set_": set_in,
    "swap_tensors": swapped,
}
OF_TRANSFORMS = "another of torch's function transforms"
STEPS = DERIVATIVES | MOVES


class DerivesInStep(AsksInStep):
    """Asks in a step, where gradients are on."""


@cache
def alone(style: type[Asks]) -> Asks:
    return fit(style(STEPS if style is DerivesInStep else DERIVATIVES))


def assert_as_alone(style: type[Asks], ways: dict[str, Way], strategy: str) -> dict[str, str]:
    """Compare what ranks got with one device's, and return what was refused, by name."""
    refused = {}
    for name, found in fit(style(ways), STRATEGIES[strategy]()).found.items():
        for value in found:
            if isinstance(value, str):
                refused[name] = value
            else:
                expected = alone(style).found[name][0]
                np.testing.assert_allclose(value, expected, rtol=1e-9, err_msg=name)
    return refused


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "pipeline", "zero2"])
def test_a_hook_differentiates_weights_as_on_one_device(strategy: str) -> None:
    """Forward derivatives of ranks in one process met, and shards were no use in transforms.

    `linearize` raised torch's errors of its own recorder, and what is computed beside a weight, in
    a transform, an error of a tensor without memory.
    """
    refused = assert_as_alone(Asks, DERIVATIVES, strategy)
    assert set(refused) <= {"linearize", "linearize of a parameter"}
    assert not refused or strategy == "zero3"
    assert all(OF_TRANSFORMS in message for message in refused.values())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "zero3", "zero2"])
def test_a_step_differentiates_weights_as_on_one_device(strategy: str) -> None:
    """Under tensor parallel `jvp` and `hvp` of torch.autograd.functional had a part of the ranks'.

    `plain.data = weight` ended the process there, and in a pipeline differentiating what a
    transform had made was a raw error, as was any gradient taken with gradients off.
    """
    refused = assert_as_alone(DerivesInStep, STEPS, strategy)
    by_name = {"set_", "swap_tensors"} if strategy == "tensor" else set()
    transformed = {name for name, message in refused.items() if OF_TRANSFORMS in message}
    assert transformed | by_name == set(refused)
    assert not transformed or strategy == "tensor"
    assert not transformed & {
        "grad",
        "vjp",
        "jacrev",
        "vmap",
        *(o for o in STEPS if o[:7] == "old jvp"),
    }


class TakenWithoutGradients(AsksInStep):
    """Takes a gradient in a part of a step where gradients are off."""

    def ask(self, weight: Any) -> None:
        with torch.enable_grad():
            leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
            out = (leaf * weight.sum()).sum()
        with torch.no_grad():
            found = torch.autograd.grad(out, [leaf, weight])
        super().ask(torch.stack([one.sum() for one in found]))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["tensor", "zero3"])
def test_a_gradient_is_taken_where_gradients_are_off(strategy: str) -> None:
    """It was torch's error of a missing node: one finds that of a leaf with gradients on only."""
    ways = {"it": lambda found: found}
    run = fit(TakenWithoutGradients(ways), STRATEGIES[strategy]())
    expected = fit(TakenWithoutGradients(ways)).found["it"][0]
    for found in run.found["it"]:
        np.testing.assert_allclose(found, expected, rtol=1e-9)
