"""The backward of one microbatch through one stage: whole, or its two halves.

    full_backward      inputs and weights at once
    input_backward     what the previous stage waits for; weight_backward: the rest, later

Gradients are returned, not put on the parameters. Source of the halves: zero-bubble pipelines,
arXiv:2401.10241, as torch.distributed.pipelining computes them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_shard.pipeline_parallel._torch import stage_backward_input, stage_backward_weight

Rest = Callable[[], Sequence[Tensor | None]]
"""What is left of a backward once the inputs have their gradients."""


def full_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    params: Sequence[nn.Parameter],
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    """Return the gradients of inputs (zeros where unused) and of parameters (None where unused).

    Args:
        roots: Outputs that require gradients, or the loss; empty when there is nothing to do.
        grads: Of the roots; None for a loss.
        inputs: Received tensors that require gradients.
        params: The stage's parameters that require gradients.
    """
    wanted = [*inputs, *params]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        found = torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    return _filled(found[: len(inputs)], inputs), found[len(inputs) :]


def input_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    params: Sequence[nn.Parameter],
) -> tuple[list[Tensor], Rest]:
    """Return the gradients of inputs, and what is left to do for those of parameters."""
    if not roots or not inputs or not params:

        def whole() -> Sequence[Tensor | None]:
            return full_backward(roots, grads, [], params)[1]

        if not inputs:
            return [], whole
        found = full_backward(roots, grads, inputs, [])[0]
        return found, lambda: [None] * len(params)
    # torch detaches the roots in place: no view allows that, nor a tensor that the graph has saved
    ends = [root.clone() for root in roots]
    given, groups = stage_backward_input(
        ends, None if grads is None else list(grads), list(inputs), iter(params)
    )
    for one in inputs:
        one.grad = None  # torch keeps them there as well

    plain = [group for group in groups if len(group["intermediates"]) == 1]
    reached = {node for group in plain for node in group["params"]}
    others = [param for param in params if get_gradient_edge(param).node not in reached]

    def rest() -> Sequence[Tensor | None]:
        found = dict(zip(others, _grads_of(roots, others, grads), strict=True))
        with _grads_aside(params):
            stage_backward_weight(iter(params), plain)
            return [found.get(param, param.grad) for param in params]

    return _filled(given, inputs), rest


def _grads_of(
    roots: Sequence[Tensor], params: Sequence[nn.Parameter], grads: Sequence[Tensor] | None
) -> Sequence[Tensor | None]:
    """Return the gradients of parameters that torch's halves lose or count twice.

    These are used without any input, as a table of positions, or in several places.
    """
    if not params:
        return []
    return torch.autograd.grad(roots, params, grads, retain_graph=True, allow_unused=True)


def weight_backward(rest: Rest, params: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return the gradients of the parameters."""
    return rest() if params else []


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(one) if grad is None else grad
        for grad, one in zip(found, like, strict=True)
    ]


class _grads_aside:  # noqa: N801 - reads as a function
    """Take what stands in `.grad` away for a while."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._kept: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._kept = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None

    def __exit__(self, *_: object) -> None:
        for param, kept in zip(self._params, self._kept, strict=True):
            param.grad = kept
