"""The gradients of a batch's microbatches: added up in a stash, handed over in one backward.

    backward of microbatch 0, 1 ...  ──> stash ──┐
    the returned loss ── backward ──> HandOver ──┴──> each parameter, once

The backward of the loss that the step returns multiplies the stash by the loss's gradient and gives
it to the engine, so that Lightning's zeroing, accumulation and scaling work as they do elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.data_parallel.graph_borders import gradient_edge
from lightning_shard.data_parallel.torch_private import gradient_hooks, is_wrapped
from lightning_shard.errors import ConfigError

Taker = Callable[[nn.Parameter, Tensor], None]
"""Takes the gradient of a parameter: `DataParallelEngine.take_gradient`."""


def sum_dtype(param: Tensor) -> torch.dtype:
    """Return the format in which microbatches' gradients add up, at least float32."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


class GradientStash:
    """Sums of gradients, by parameter.

    Args:
        params: Parameters that require gradients.
        seed: Factor by which a loss scaler has made the gradients too large, shape () if a tensor.

    Attributes:
        on_give: Called before the sums are given away.
    """

    def __init__(self, params: Sequence[nn.Parameter], seed: Tensor | float) -> None:
        self.params = list(params)
        self.seed = seed
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.on_give: Callable[[], None] = lambda: None
        self._is_given = False
        self._own: set[nn.Parameter] = set()  # whose sums lie in memory of our own

    @torch.no_grad()
    def add(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
        """Add a microbatch's gradients."""
        sums, added = [], []
        for param, grad in zip(params, grads, strict=True):
            if grad is None:
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            grad = grad.to(sum_dtype(grad))
            if param in self._own:
                sums.append(self._sums[param])
                added.append(grad)
            elif param in self._sums:  # autograd may have given others the same memory
                self._sums[param] = self._sums[param] + grad
                self._own.add(param)
            else:
                self._sums[param] = grad
        if sums:
            torch._foreach_add_(sums, added)

    def own(self, param: nn.Parameter) -> Tensor:
        """Return a parameter's sum, which may be changed; zeros when there is none."""
        total = self._sums.get(param)
        if total is None:
            total = torch.zeros_like(param, dtype=sum_dtype(param))
        self._own.add(param)
        self._sums[param] = total.contiguous().clone()
        return self._sums[param]

    def take(self, param: Tensor) -> Tensor:
        """Return a parameter's sum and forget it."""
        total = self.own(param)  # type: ignore[arg-type]
        del self._sums[param]  # type: ignore[arg-type]
        self._own.discard(param)
        return total

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()
        self._own.clear()

    def holds(self, param: Tensor) -> bool:
        """Whether a parameter has had a gradient."""
        return param in self._sums

    def hand_over(self, loss: Tensor, taker: Taker) -> Tensor:
        """Return the loss's value, whose backward gives every sum to `taker`."""
        handed: Tensor = _HandOver.apply(  # type: ignore[no-untyped-call]
            loss.detach().requires_grad_(), self, taker
        )
        return handed

    @torch.no_grad()
    def give(self, grad: Tensor, taker: Taker) -> None:
        """Give the sums away once, times the gradient of the loss, and forget them."""
        if self._is_given:
            raise ConfigError(
                "The loss of a pipeline's step was sent backward twice, expected once: its "
                "gradients are handed over and not kept. Call backward once."
            )
        self._is_given = True
        self.on_give()
        factor = grad / self.seed
        is_one = factor.device.type == "cpu" and factor.item() == 1  # elsewhere asking would wait
        for param in [param for param in self.params if param in self._sums]:
            total = self._sums.pop(param)
            taker(param, total if is_one else total * factor)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, stash: GradientStash, taker: Taker) -> Tensor:
        ctx.stash, ctx.taker = stash, taker
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.stash.give(grads[0], ctx.taker)
        return None, None, None


def leaf_nodes(roots: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes that take the gradients of leaves, `variable` being the leaf.

    A leaf whose format changes has a new node from then on: one graph may have several of it.
    """
    nodes = _nodes_from(root.grad_fn for root in roots)
    return (node for node in nodes if hasattr(node, "variable"))


def _nodes_from(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield nodes of autograd's graph and all that they lead to, each once."""
    seen, nodes = set(), list(starts)
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


@contextmanager
def hooks_set_aside(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the parameters' gradient hooks inside, so that they run once for the whole batch."""
    hooked: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for param in params:
        if hooks := gradient_hooks(param):
            hooked.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)


class OfLastStage:
    """Refuses gradients of which another stage than the loss's has a part, or all.

    `given` are the tensors that other stages compute with, as far as the step has come.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._given = given

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs that the last stage alone has; see `Differentiator`."""
        if any(map(is_placeholder, inputs)):
            raise _refusal("training_step", "weights that other stages of the pipeline have")
        elsewhere = set(_nodes_from(map(_node, self._given)))
        if any(_node(one) in elsewhere for one in inputs):
            raise _refusal("training_step", "what earlier stages of the pipeline compute with")
        return run(inputs)


class AfterSchedule:
    """Refuses gradients by inputs of a loss whose microbatches have been through their backward."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Refuse all; see `Differentiator`."""
        raise _refusal("backward", "some inputs, after each microbatch has been sent backward")


def _node(value: Any) -> Any:
    """Return the node of the graph where a tensor's gradient arrives; None without one.

    What is differentiated by torch.func has a graph of its own, which no other stage has met.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or is_wrapped(value):
        return None
    return gradient_edge(value).node


def _refusal(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} asks for gradients of {what}, by torch.autograd.grad or backward(inputs=...); "
        f"expected a loss that is sent backward as a whole. Freeze what is not to be trained, "
        f"change gradients in on_after_backward, or use strategy='zero2'."
    )
