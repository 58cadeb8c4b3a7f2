"""The gradients of a batch's microbatches: added up aside, and handed over in one backward.

    backward of microbatch 0, 1 ...  ──> stash ──┐
    the returned loss ── backward ──> HandOver ──┴──> each parameter, once

Lightning zeroes gradients after `training_step` and before `backward`, divides the loss for
accumulation and scales it; the data-parallel engine reduces what one backward brings. All that goes
on as ever, because the loss that the step returns is connected to the parameters by `HandOver`,
whose backward multiplies the stash by the gradient of the loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigError

_NARROW = (torch.float16, torch.bfloat16)  # added up in float32


class GradientStash:
    """Sums of gradients, by parameter.

    Args:
        params: Those that require gradients.
        seed: The gradients are this many times too large: of a loss scaler.
    """

    def __init__(self, params: Sequence[nn.Parameter], seed: float) -> None:
        self.params = list(params)
        self.seed = seed
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._own: set[nn.Parameter] = set()  # whose sums lie in memory of our own

    @torch.no_grad()
    def add(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
        """Add a microbatch's gradients."""
        for param, grad in zip(params, grads, strict=True):
            if grad is None:
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.dtype in _NARROW:
                grad = grad.float()
            if param in self._own:
                self._sums[param].add_(grad)
            elif param in self._sums:  # autograd may have given others the same memory
                self._sums[param] = self._sums[param] + grad
                self._own.add(param)
            else:
                self._sums[param] = grad

    def own(self, param: nn.Parameter) -> Tensor:
        """Return a parameter's sum, which may be changed; zeros when there is none."""
        total = self._sums.get(param)
        kind = torch.float32 if param.dtype in _NARROW else param.dtype
        self._own.add(param)
        self._sums[param] = (
            torch.zeros_like(param, dtype=kind) if total is None else total.contiguous().clone()
        )
        return self._sums[param]

    def holds(self, param: nn.Parameter) -> bool:
        """Whether a parameter has had a gradient."""
        return param in self._sums

    def hand_over(self, loss: Tensor) -> Tensor:
        """Return the loss's value, whose backward gives the parameters their sums."""
        params = [param for param in self.params if param in self._sums]
        handed: Tensor = _HandOver.apply(  # type: ignore[no-untyped-call]
            loss.detach().requires_grad_(), self, *params
        )
        return handed

    @torch.no_grad()
    def take(self, params: Sequence[nn.Parameter], grad: Tensor) -> list[Tensor]:
        """Return the sums times the gradient of the loss, and forget them.

        Raises:
            ConfigError: They have been taken already.
        """
        if not self._sums:
            raise ConfigError(
                "The loss of a pipeline's step was sent backward twice, expected once: its "
                "gradients are handed over and not kept. Call backward once."
            )
        factor = grad / self.seed
        is_one = factor.device.type == "cpu" and factor.item() == 1  # elsewhere asking would wait
        taken = [
            self._scaled(param, None if is_one else factor).to(param.dtype) for param in params
        ]
        self._sums.clear()
        return taken

    def _scaled(self, param: nn.Parameter, factor: Tensor | None) -> Tensor:
        total = self._sums.pop(param)
        if param not in self._own:
            return total.clone() if factor is None else total * factor
        return total if factor is None else total.mul_(factor)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, stash: GradientStash, *params: nn.Parameter) -> Tensor:
        ctx.stash, ctx.params = stash, params
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.params:  # a stage whose parameters are all frozen or unused
            return None, None
        return None, None, *ctx.stash.take(ctx.params, grads[0])


def leaves_of_graph(root: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a tensor's gradient goes to."""
    seen = set()
    nodes = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@contextmanager
def hooks_set_aside(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep the hooks of parameters for the one gradient of the whole batch."""
    hooked: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for param in params:
        if hooks := param._backward_hooks:
            hooked.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
