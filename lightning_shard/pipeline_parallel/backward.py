"""The backward of one microbatch through one stage: all at once, or in two halves.

    full_backward      gradients of inputs and weights at once
    input_backward     gradients that the previous stage waits for
    weight_backward    the rest, later

Gradients are returned, not put on the parameters. Source of the halves: zero-bubble pipelines,
arXiv:2401.10241, as torch.distributed.pipelining computes them.

Where ZeRO stage 3 unshards a parameter in another format than that of its shards, each unshard
gives it another node of autograd, so that an earlier graph leads to a node of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_shard.pipeline_parallel._torch import stage_backward_input, stage_backward_weight
from lightning_shard.pipeline_parallel.gradients import leaf_nodes

Rest = Callable[[], Sequence[Tensor | None]]
"""Computes the parameters' gradients, the rest of a backward after the inputs' gradients."""

AtHand = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]
"""Keeps parameters unsharded inside: `DataParallelEngine.at_hand`."""


def always_at_hand(params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Do nothing, for parameters that are never resharded."""
    return nullcontext()


def full_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    params: Sequence[nn.Parameter],
    *,
    reformatted: bool = False,
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    """Return the gradients of inputs (zeros where unused) and of parameters (None where unused).

    Args:
        roots: Outputs that require gradients, or the loss; empty when there is nothing to do.
        grads: Gradients of the roots; None for a loss.
        inputs: Received tensors that require gradients.
        params: The stage's parameters that require gradients.
        reformatted: Whether parameters may have changed their format since the forward.
    """
    if not roots or not (inputs or params):
        return _filled([None] * len(inputs), inputs), [None] * len(params)
    leaves = _leaves(roots, params) if reformatted else []
    ends: Sequence[Any] = [leaf.edge for leaf in leaves] if reformatted else params
    found: Sequence[Tensor | None] = ()
    if inputs or ends:
        found = torch.autograd.grad(roots, [*inputs, *ends], grads, allow_unused=True)
    of_params = found[len(inputs) :]
    if reformatted:
        of_params = _by_parameter(params, zip(leaves, of_params, strict=True))
    return _filled(found[: len(inputs)], inputs), of_params


def input_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    params: Sequence[nn.Parameter],
    at_hand: AtHand = always_at_hand,
) -> tuple[list[Tensor], Rest]:
    """Return the gradients of inputs, and the function that computes those of parameters.

    The arguments are those of `full_backward`; `at_hand` makes the context of the second half.
    """
    # torch detaches the roots in place: no view allows that, nor a tensor that the graph has saved
    ends = [root.clone() for root in roots]
    used = _used(ends, inputs)
    if not used or not params:

        def full() -> Sequence[Tensor | None]:
            return full_backward(roots, grads, [], params, reformatted=True)[1]

        if not used:
            return _filled([None] * len(inputs), inputs), full
        found = full_backward(roots, grads, inputs, [])[0]
        return found, lambda: [None] * len(params)
    leaves = _leaves(roots, params)
    given, groups = stage_backward_input(
        ends,
        None if grads is None else list(grads),
        used,
        iter(leaves),  # type: ignore[arg-type]
    )
    for one in inputs:
        one.grad = None  # torch keeps them there as well

    plain = [group for group in groups if len(group["intermediates"]) == 1]
    reached = {node for group in plain for node in group["params"]}
    others = [leaf for leaf in leaves if leaf.grad_fn not in reached]

    def rest() -> Sequence[Tensor | None]:
        with at_hand(params):
            found = dict(zip(others, _grads_of(roots, others, grads), strict=True))
            stage_backward_weight(iter(leaves), plain)  # type: ignore[arg-type]
        return _by_parameter(params, ((leaf, found.get(leaf, leaf.grad)) for leaf in leaves))

    by_input = dict(zip(used, given, strict=True))
    return _filled([by_input.get(one) for one in inputs], inputs), rest


def _used(ends: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs that lie in the graph; torch 2.11 refuses others."""
    found = {node.variable for node in leaf_nodes(ends)}
    return [one for one in inputs if one.grad_fn is not None or one in found]


def _grads_of(
    roots: Sequence[Tensor], leaves: Sequence["_Leaf"], grads: Sequence[Tensor] | None
) -> Sequence[Tensor | None]:
    """Return the gradients of parameters used without any input or in several places.

    Torch's halves lose those, or count them twice.
    """
    if not leaves:
        return []
    edges = [leaf.edge for leaf in leaves]
    return torch.autograd.grad(roots, edges, grads, retain_graph=True, allow_unused=True)


def weight_backward(rest: Rest, params: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    """Compute the second half of a backward: the gradients of the parameters."""
    return rest() if params else []


class _Leaf:
    """A parameter as one graph has it; torch's halves take it for a tensor, and set its `grad`."""

    requires_grad = True

    def __init__(self, param: nn.Parameter, node: Any) -> None:
        self.param, self.grad_fn = param, node
        self.grad: Tensor | None = None

    @property
    def edge(self) -> GradientEdge:
        """Edge of the graph along which the parameter's gradient arrives."""
        return GradientEdge(self.grad_fn, 0)


def _leaves(roots: Sequence[Tensor], params: Sequence[nn.Parameter]) -> list[_Leaf]:
    wanted = set(params)
    nodes = (node for node in leaf_nodes(roots) if node.variable in wanted)
    return [_Leaf(node.variable, node) for node in nodes]


def _by_parameter(
    params: Sequence[nn.Parameter], found: Iterable[tuple[_Leaf, Tensor | None]]
) -> list[Tensor | None]:
    """Add up the gradients of the leaves of each parameter."""
    sums: dict[nn.Parameter, Tensor] = {}
    for leaf, grad in found:
        if grad is not None:
            before = sums.get(leaf.param)
            sums[leaf.param] = grad if before is None else before + grad
    return [sums.get(param) for param in params]


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.zeros_like(one) if grad is None else grad
        for grad, one in zip(found, like, strict=True)
    ]
