"""Does an optimizer treat each element, or each parameter, by itself? A trial of it tells.

A rank updates 1-D shards of parameters. Adam does to a shard what it would do to it inside the
matrix; Muon, Adafactor, LAMB or LBFGS do not, and would be wrong without a word. So a trial
optimizer with the same settings takes two steps on a small matrix and on the same matrix in shards,
and the results are compared. Where ranks have some parameters each, and those full, the trial has
two matrices, together and one by one: only LBFGS and its like fail that.

Optimizers that are not torch's own may treat large matrices, or convolutions, in another way than
small matrices, or begin with norms after some steps. They take more steps, and take them on a
tensor of each number of dimensions that a param group has, too. A gradient's rows may be zero.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard.checkpoint.trial_optimizer import trial_optimizer

_SHAPE = (4, 6)
_LARGEST = {2: (256, 256)}  # thresholds are seldom above; its shapes of more dimensions follow
_LARGEST_OF_MORE = (48, 48, 7, 7, 7)
_LR = 1e-2
_NUM_STEPS, _MORE_STEPS = 2, 6  # of torch's own optimizers, and of others

DIFFERENCE = "in a trial, the parts of a whole came out differently from the whole"
Parts = Callable[[Tensor], list[list[Tensor]]]
Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def why_not_elementwise(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None
) -> str | None:
    """Say why an optimizer's update of a shard differs from its update of the full parameter.

    Args:
        optimizer: The optimizer; it is not changed.
        groups: The param groups to try; None tries all.

    Returns:
        The result of the trial of the first param group that fails, in words; None when all pass.
    """
    return _why_not(optimizer, groups, in_shards)


def why_not_separate(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]] | None = None
) -> str | None:
    """Say why an optimizer updates some of the parameters differently than all of them.

    Each parameter is full here; arguments and result are as `why_not_elementwise` has them.
    """
    return _why_not(optimizer, groups, one_by_one)


def needs_full_parameters(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer updates the full parameters of a group each by itself, but no shards."""
    is_elementwise = why_not_elementwise(optimizer, [group]) is None
    return not is_elementwise and why_not_separate(optimizer, [group]) is None


def _why_not(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]] | None,
    parts: Parts,
) -> str | None:
    if _sends_messages(optimizer):
        return (
            "its step sends messages between ranks itself, as if each had all gradients; one "
            "that is written for a single device can do without"
        )
    tried = optimizer.param_groups if groups is None else groups
    with torch.random.fork_rng(devices=[]):
        reasons = [_try_group(optimizer, group, parts) for group in tried]
    return next((reason for reason in reasons if reason is not None), None)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _sends_messages(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer that is not torch's own names torch.distributed.

    A trial would wait for ranks that do something else.
    """
    if is_of_torch(optimizer):
        return False
    step = inspect.unwrap(type(optimizer).step)
    found = getattr(step, "__globals__", {})
    names = getattr(getattr(step, "__code__", None), "co_names", ())
    return any(_is_of_distributed(found.get(name)) for name in names) or (
        "distributed" in names and found.get("torch") is torch
    )


def _is_of_distributed(value: Any) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return str(name).startswith("torch.distributed")


def _try_group(optimizer: Optimizer, group: dict[str, Any], parts: Parts) -> str | None:
    shapes = [_SHAPE] if is_of_torch(optimizer) else [_SHAPE, *_shapes_like(group["params"])]
    reasons = (_try_shape(optimizer, group, parts, shape) for shape in shapes)
    return next((reason for reason in reasons if reason is not None), None)


def _shapes_like(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return a shape for each number of dimensions: the largest parameter's, up to a limit."""
    largest: dict[int, Tensor] = {}
    for param in params:
        if is_lazy(param) or param.ndim < 2 or param.numel() == 0:
            continue
        largest[param.ndim] = max(largest.get(param.ndim, param), param, key=Tensor.numel)
    return [_limited(param.shape) for _, param in sorted(largest.items())]


def _limited(shape: Sequence[int]) -> tuple[int, ...]:
    limits = (*_LARGEST.get(len(shape), _LARGEST_OF_MORE), *[2] * len(shape))
    first, *others = (min(size, limit) for size, limit in zip(shape, limits, strict=False))
    return (max(first, 4), *others)  # each half has a row that is zero, and one that is not


def _try_shape(
    optimizer: Optimizer, group: dict[str, Any], parts: Parts, shape: tuple[int, ...]
) -> str | None:
    """Try steps without a closure and with one, as a Trainer takes them; some need it."""
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    num_steps = _NUM_STEPS if is_of_torch(optimizer) else _MORE_STEPS
    values = torch.randn(1 + num_steps, *shape, generator=generator).to(device)  # weight, gradients
    values[-1, ::2] = 0  # rows that no sample has reached
    runs = [[parts(value)[i] for value in values] for i in range(len(parts(values[0])))]
    raised: list[str] = []
    losses = (None, _same_loss) if _takes_closure(optimizer) else (None,)
    for loss in losses:
        try:
            outcome = _outcome(optimizer, group, runs, loss)
            if loss is not None and torch.equal(outcome[0][0], runs[0][0][0]):  # shows nothing
                outcome = _outcome(optimizer, group, runs, _falling_loss)
        except Exception as error:  # whatever it raises, it says why
            raised.append(_raised(error))
            continue
        reason = _difference(outcome)
        if reason is not None:
            return reason
    return raised[0] if len(raised) == len(losses) else None


def _outcome(
    optimizer: Optimizer,
    group: dict[str, Any],
    runs: Sequence[Sequence[list[Tensor]]],
    loss: Loss | None,
) -> list[list[Tensor]]:
    """Return the updated values of the first run, which has all, and of the runs of its parts."""
    full, *shards = [_steps(optimizer, group, weight, grads, loss) for weight, *grads in runs]
    return [full, list(chain(*shards))]


def why_different(trial: Callable[[], Sequence[Sequence[Tensor]]]) -> str | None:
    """Say how a trial's result for its parts differs from its result for all of them at once.

    Args:
        trial: Returns the tensors of the undivided run, and those of the runs of the parts.

    Returns:
        The difference, or the exception that the trial raised, in words; None when they agree.
    """
    try:
        return _difference(trial())
    except Exception as error:  # whatever it raises, it says why
        return _raised(error)


def _difference(runs: Sequence[Sequence[Tensor]]) -> str | None:
    return None if are_alike(runs) else DIFFERENCE


def are_alike(runs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of a whole and those of its parts are equal, but for rounding."""
    expected, got = (torch.cat([one.flatten() for one in run]) for run in runs)
    return torch.allclose(got, expected, rtol=1e-5, atol=1e-7)


def _raised(error: Exception) -> str:
    return f"a trial step raised {type(error).__name__}: {error}"


def in_shards(matrix: Tensor) -> list[list[Tensor]]:
    """Return the matrix and each of its shards as runs of their own: a rank has no other shard."""
    flat = matrix.flatten()
    cut = flat.numel() * 5 // 12  # inside a row
    return [[matrix], [flat[:cut]], [flat[cut:]]]


def one_by_one(matrix: Tensor) -> list[list[Tensor]]:
    """Return two matrices in one run, and each in a run of its own."""
    upper, lower = matrix.tensor_split(2)
    return [[upper, lower], [upper], [lower]]


def _steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: list[Tensor],
    grads: Sequence[list[Tensor]],
    loss: Loss | None,
) -> list[Tensor]:
    """Take one step per gradient with a trial of the optimizer; returns the updated values.

    Without a loss the steps are taken without a closure.
    """
    params = [torch.nn.Parameter(value.clone()) for value in values]
    settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
    if "lr" in settings:  # a warm-up may begin at zero, where every optimizer does the same
        settings["lr"] = _LR
    trial = trial_optimizer(optimizer, {**settings, "params": params})
    for step in grads:
        closure = _closure(params, step, loss or _same_loss)
        closure()
        step_of: Callable[..., Any] = type(optimizer).step
        step_of(trial, *([] if loss is None else [closure]))
    return [param.detach() for param in params]


def _same_loss(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss that is the same on all ranks, as an optimizer is given it (`mean_loss`)."""
    return params[0].new_ones(())


def _falling_loss(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a loss with these gradients, so that a line search has something to lower."""
    return sum(
        ((param.detach() * grad).sum() for param, grad in zip(params, grads, strict=True)),
        start=params[0].new_zeros(()),
    )


def _closure(params: Sequence[Tensor], grads: Sequence[Tensor], loss: Loss) -> Callable[[], Tensor]:
    """Return the closure that a Trainer hands to a step: it sets gradients and returns a loss."""

    def closure() -> Tensor:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        return loss(params, grads)

    return closure


def _takes_closure(optimizer: Optimizer) -> bool:
    """Whether the first argument of a step is a closure; whoever requires one means that."""
    _, *others = inspect.signature(type(optimizer).step).parameters.values()
    return bool(others) and (others[0].name == "closure" or others[0].default is others[0].empty)
