"""The gradients of a batch's microbatches: added up in a stash, handed over in one backward.

    full_backward      gradients of inputs and weights at once      ──┐
    input_backward     gradients that the previous stage waits for  ──┼──> stash ──┐
    its second half    the rest, later                              ──┘            │
    the returned loss ── backward ──> HandOver ────────────────────────────────────┴──> parameters

The backward of the loss that the step returns multiplies the stash by the loss's gradient and gives
it to the engine, so that Lightning's zeroing, accumulation and scaling work as they do elsewhere.
Source of the halves: zero-bubble pipelines, arXiv:2401.10241, as torch.distributed.pipelining has
them. Where ZeRO stage 3 unshards a parameter in another format than that of its shards, each
unshard gives it another node of autograd, so that an earlier graph leads to a node of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.data_parallel.graph_borders import gradient_edge
from lightning_shard.data_parallel.torch_private import gradient_hooks, is_wrapped, set_aside
from lightning_shard.data_parallel.views.sharded_parameter import shards_as_they_are
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel._torch import stage_backward_input, stage_backward_weight

Taker = Callable[[nn.Parameter, Tensor], None]
"""Takes the gradient of a parameter: `DataParallelEngine.take_gradient`."""


_LARGE_NUMEL = 1 << 14


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
        takes: Whether a gradient is added up as soon as autograd has it, while it is in the
            processor's cache, and its memory serves the next one.
        has_all: Whether one stage alone has the sums of a parameter that several use.
    """

    takes = has_all = False

    def __init__(self, params: Sequence[nn.Parameter], seed: Tensor | float) -> None:
        self.params = list(params)
        self.seed = seed
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.on_give: Callable[[], None] = lambda: None
        self._is_given = False
        self._own: set[nn.Parameter] = set()  # whose sums lie in memory of our own
        self._taken: set[nn.Parameter] = set()  # in the backward that runs

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hear of gradients inside, to add them up where this `takes` them."""
        with shards_as_they_are():
            hooks = [
                Tensor.register_hook(one, partial(self._take, one))  # type: ignore[no-untyped-call]
                for one in self.params  # of small ones, and on devices, one call adds many
                if one.device.type == "cpu" and one.numel() >= _LARGE_NUMEL
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, param: nn.Parameter, grad: Tensor) -> Tensor | None:
        if not self.takes or grad.is_sparse:
            return None
        self._taken.add(param)
        if param in self._own:
            self._sums[param] += grad
        else:
            self._begin(param, grad)
        return grad.new_empty(()).expand_as(grad)  # autograd keeps this one until it is through

    def _begin(self, param: nn.Parameter, grad: Tensor) -> None:
        if param in self._sums:  # autograd may have given others the same memory
            self._sums[param] = self._sums[param] + grad
            self._own.add(param)
        else:
            self._sums[param] = grad.to(sum_dtype(grad))

    @torch.no_grad()
    def add(
        self,
        params: Sequence[nn.Parameter],
        grads: Sequence[Tensor | None],
        number: int = 0,
        stage: int = 0,
    ) -> None:
        """Add the gradients of a microbatch, `number` of them, that a stage has made."""
        sums, added = [], []
        for param, grad in zip(params, grads, strict=True):
            if grad is None or param in self._taken:
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            if param in self._own:
                sums.append(self._sums[param])
                added.append(grad.to(sum_dtype(grad)))
            else:
                self._begin(param, grad)
        if sums:
            torch._foreach_add_(sums, added)
        self._taken.clear()

    def close(self) -> None:
        """Note that all microbatches have added theirs."""

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


def num_uses(roots: Sequence[Tensor], params: Sequence[nn.Parameter]) -> Counter[nn.Parameter]:
    """Return at how many places a graph uses each of some parameters."""
    wanted = set(params)
    ends = (
        end
        for node in _nodes_from(root.grad_fn for root in roots)
        for end, _ in node.next_functions
    )
    leaves = (getattr(end, "variable", None) for end in ends)
    return Counter(leaf for leaf in leaves if leaf is not None and leaf in wanted)


def _nodes_from(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield nodes of autograd's graph and all that they lead to, each once."""
    seen, nodes = set(), list(starts)
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def hooks_set_aside(params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Remove the parameters' gradient hooks inside, so that they run once for the whole batch."""
    return set_aside(hooks for param in params if (hooks := gradient_hooks(param)))


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
    """Return the node of the graph where a tensor's gradient arrives; None without one."""
    # What is differentiated by torch.func has a graph of its own, which no other stage has met.
    if not isinstance(value, Tensor) or not value.requires_grad or is_wrapped(value):
        return None
    return gradient_edge(value).node


def _refusal(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} asks for gradients of {what}, by torch.autograd.grad or backward(inputs=...); "
        f"expected a loss that is sent backward as a whole. Freeze what is not to be trained, "
        f"change gradients in on_after_backward, or use strategy='zero2'."
    )


Rest = Callable[[], Sequence[Tensor | None]]
"""Computes the parameters' gradients, the rest of a backward after the inputs' gradients."""

AtHand = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]
"""Keeps parameters unsharded inside: `DataParallelEngine.at_hand`."""


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
    ends: Sequence[Any] = [leaf.edge for leaf in leaves] if reformatted else _ends(params)
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
    at_hand: AtHand = lambda params: nullcontext(),
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


def _ends(params: Sequence[nn.Parameter]) -> list[Any]:
    """Return where a backward stops: parameters that look full to user code are edges."""
    return [one if type(one) is nn.Parameter else gradient_edge(one) for one in params]


def _used(ends: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs that lie in the graph; torch 2.11 refuses others."""
    found = {node.variable for node in leaf_nodes(ends)}
    return [one for one in inputs if one.grad_fn is not None or one in found]


def _grads_of(
    roots: Sequence[Tensor], leaves: Sequence["_Leaf"], grads: Sequence[Tensor] | None
) -> Sequence[Tensor | None]:
    """Return the gradients of parameters used without any input or in several places."""
    # Torch's halves lose those, or count them twice.
    if not leaves:
        return []
    edges = [leaf.edge for leaf in leaves]
    return torch.autograd.grad(roots, edges, grads, retain_graph=True, allow_unused=True)


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
