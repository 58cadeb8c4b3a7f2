"""Does an optimizer treat every element by itself? Asked of the optimizer, not of a list of names.

A rank updates 1-D pieces of parameters. Adam does to a piece what it would do to it inside the
matrix; Muon, Adafactor, LAMB or LBFGS do not, and would be wrong without a word. So a twin with
the same settings takes two steps on a small matrix and on the same matrix in pieces, and the
results are compared.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SHAPE = (4, 6)
_CUT = 10  # inside a row
_LR = 1e-2


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether updating 1-D pieces equals updating the whole, for every group's settings."""
    return why_not_elementwise(optimizer) is None


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """What the trial has shown of the first group that fails it; None when all pass."""
    with torch.random.fork_rng(devices=[]):
        reasons = [_try_group(optimizer, group) for group in optimizer.param_groups]
    return next((reason for reason in reasons if reason is not None), None)


def _try_group(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    device = next((param.device for param in group["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_SHAPE, generator=generator).to(device)
    grads = [torch.randn(_SHAPE, generator=generator).to(device) for _ in range(2)]
    flat = weight.flatten()
    try:
        (whole,) = _steps(optimizer, group, [weight], [[grad] for grad in grads])
        pieces = _steps(
            optimizer,
            group,
            [flat[:_CUT], flat[_CUT:]],
            [[grad.flatten()[:_CUT], grad.flatten()[_CUT:]] for grad in grads],
        )
    except Exception as error:  # whatever a foreign optimizer raises, it says why
        return f"a trial step raised {type(error).__name__}: {error}"
    if torch.allclose(whole.flatten(), torch.cat(pieces), rtol=1e-5, atol=1e-7):
        return None
    return "in a trial, pieces of a matrix came out differently from the matrix"


def _steps(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]
) -> list[Tensor]:
    """Take one step per gradient with a twin of the optimizer; returns the updated values."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
    if "lr" in settings:  # a warm-up may begin at zero, where every optimizer does the same
        settings["lr"] = _LR
    twin = _twin(optimizer, {**settings, "params": params})
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        type(optimizer).step(twin)
    return [param.detach() for param in params]


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class on one group, with state of its own."""
    try:  # some make their state in the constructor
        return type(optimizer)([group], **optimizer.defaults)
    except TypeError:  # its defaults are not its constructor's arguments
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        twin.add_param_group(group)
        return twin
