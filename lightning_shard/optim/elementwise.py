"""What does an optimizer treat by itself? Asked of the optimizer, not of a list of names.

A rank updates 1-D pieces of parameters. Adam does to a piece what it would do to it inside the
matrix; Muon, Adafactor, LAMB or LBFGS do not, and would be wrong without a word. So a twin with
the same settings takes two steps on a small matrix and on the same matrix in pieces, and the
results are compared. Where ranks have some parameters each, and those whole, the trial has two
matrices, together and one by one: only LBFGS and its like fail that.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
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
        reasons = [_try_group(optimizer, group, _in_pieces) for group in optimizer.param_groups]
    return next((reason for reason in reasons if reason is not None), None)


def why_not_separate(optimizer: Optimizer) -> str | None:
    """As `why_not_elementwise`, of updating some of the parameters, each whole."""
    with torch.random.fork_rng(devices=[]):
        reasons = [_try_group(optimizer, group, _one_by_one) for group in optimizer.param_groups]
    return next((reason for reason in reasons if reason is not None), None)


def _try_group(
    optimizer: Optimizer, group: dict[str, Any], parts: Callable[[Tensor], list[list[Tensor]]]
) -> str | None:
    device = next((param.device for param in group["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, *_SHAPE, generator=generator).to(device)  # a weight, two gradients
    runs = [[parts(value)[i] for value in values] for i in range(len(parts(values[0])))]

    def results() -> list[list[Tensor]]:
        whole, *pieces = [_steps(optimizer, group, weight, grads) for weight, *grads in runs]
        return [whole, list(chain(*pieces))]

    return why_different(results)


def why_different(trial: Callable[[], Sequence[Sequence[Tensor]]]) -> str | None:
    """Say what a trial shows of a foreign function: its result for a whole, and for the parts."""
    try:
        expected, got = (torch.cat([one.flatten() for one in run]) for run in trial())
    except Exception as error:  # whatever it raises, it says why
        return f"a trial step raised {type(error).__name__}: {error}"
    if torch.allclose(got, expected, rtol=1e-5, atol=1e-7):
        return None
    return "in a trial, the parts of a whole came out differently from the whole"


def _in_pieces(matrix: Tensor) -> list[list[Tensor]]:
    """The matrix, and its pieces, as two runs."""
    flat = matrix.flatten()
    return [[matrix], [flat[:_CUT], flat[_CUT:]]]


def _one_by_one(matrix: Tensor) -> list[list[Tensor]]:
    """Two matrices in one run, and each in its own."""
    upper, lower = matrix.tensor_split(2)
    return [[upper, lower], [upper], [lower]]


def _steps(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]
) -> list[Tensor]:
    """Take one step per gradient with a twin of the optimizer; returns the updated values."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
    if "lr" in settings:  # a warm-up may begin at zero, where every optimizer does the same
        settings["lr"] = _LR
    twin = twin_of(optimizer, {**settings, "params": params})
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        type(optimizer).step(twin)
    return [param.detach() for param in params]


def twin_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class on one group, with state of its own."""
    try:  # some make their state in the constructor
        return type(optimizer)([group], **optimizer.defaults)
    except TypeError:  # its defaults are not its constructor's arguments
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        twin.add_param_group(group)
        return twin
