"""The operations that keep a `DimShardedTensor` sharded: a rule for each, by its name.

A rule takes the operation's arguments, and returns `NotImplemented` where the result would need the
other ranks' parts. Rules see no values, only shapes, so every rank decides alike.

Attentions whose heads are sharded are computed each rank with its heads:

    (B, H, T, W)           q @ k.transpose(-2, -1), softmax(-1), @ v, scaled_dot_product_attention
    (T, T), (B, 1, T, T)   a mask for all heads: as it is
    (H, T, T)              a bias of each head: its own part

Cross entropy of logits whose classes are sharded over the ranks, without gathering them.

    rank 0   x[:, :V/2]  ──► max, sum(exp(x - max)), x[target] if it is here ─┐
                                                                              ├─ all-gather
    rank 1   x[:, V/2:]  ──► max, sum(exp(x - max)), x[target] if it is here ─┘

    x          the rank's logits, (N, V / W): saved for backward, in their own dtype
    loss       = a (lse - x[target]) + e (sum(w) lse - w . x)     a = (1 - smoothing) w[target]
    gradient   = softmax (a + e sum(w)) - a onehot - e w          e = smoothing / V

The softmax is exp(x - max) / sum: log(sum) + max, rounded once more, would put a whole row off. The
gradient needs no exchange at all.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import is_narrow
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.core.tensor_calls import (
    GET_DATA,
    OF_OBJECT,
    Function,
    Kwargs,
    found_in,
    functions,
    map_only,
    writes,
)
from lightning_shard.data_parallel.graph_borders import gradient_edge
from lightning_shard.data_parallel.torch_private import FakeTensor, untraced
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.transforms import OF_RANKS, transform_refused
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel import dim_sharded_shapes as shapes
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    Part,
    full_tensor,
    own_part,
)
from lightning_shard.tensor_parallel.randomness import drawn_apart
from lightning_shard.tensor_parallel.regions import all_gathered, copy_to_region, reduce_from_region


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `torch.nn.functional.cross_entropy`, the same on every rank."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


@untraced
def parallel_cross_entropy(
    local: Tensor, target: Tensor, options: LossOptions, group: Collectives
) -> Tensor:
    """Return the cross entropy; each rank of the group must call.

    Args:
        local: Shape (..., V / W), this rank's classes, in rank order; floating point.
        target: Shape (...), class indices of 0 to V - 1, the same on every rank.
        options: Options of `torch.nn.functional.cross_entropy`.
        group: Group of the W ranks that share the classes.

    Returns:
        The loss, float32 under autocast, else of the logits' dtype. On accelerators a row whose
        target is out of range is NaN.
    """
    if local.shape[:-1] != target.shape:
        raise ConfigError(
            f"Rank {group.rank}: cross_entropy got logits for {tuple(local.shape[:-1])} and "
            f"targets of shape {tuple(target.shape)}, expected the same. Flatten both alike."
        )
    rows, flat = local.reshape(-1, local.shape[-1]), target.reshape(-1)
    counted = flat != options.ignore_index
    flat = flat.masked_fill(~counted, 0)
    _check_range(flat, rows.shape[-1] * group.size, group)
    share = counted.to(_wide(rows.dtype))  # (N,): the weight of each row
    if options.weight is not None:
        share = share * options.weight.to(share.dtype)[flat]
    losses: Tensor = _CrossEntropy.apply(rows, flat, counted, share, options, group)  # type: ignore[no-untyped-call]
    is_autocast = torch.is_autocast_enabled(local.device.type)  # then the loss is in float32
    dtype = _wide(local.dtype) if is_autocast else local.dtype
    return _reduced(losses, share, options.reduction, target.shape).to(dtype)


def _reduced(losses: Tensor, share: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / share.sum() if reduction == "mean" else losses.sum()


def _check_range(target: Tensor, num_classes: int, group: Collectives) -> None:
    if target.device.type == "cpu" and target.numel() and not isinstance(target, FakeTensor):
        low, high = (int(bound) for bound in torch.aminmax(target))
        if low < 0 or high >= num_classes:
            raise ConfigError(
                f"Rank {group.rank}: cross_entropy got targets from {low} to {high}, expected 0 to "
                f"{num_classes - 1}, or ignore_index."
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_narrow(dtype) else dtype


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; saves the logits as they are, and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (N, V / W)
        target: Tensor,  # (N,)
        counted: Tensor,
        share: Tensor,
        options: LossOptions,
        group: Collectives,
    ) -> Tensor:
        num_local = logits.shape[-1]
        own = target - group.rank * num_local
        is_on_other_ranks = (own < 0) | (own >= num_local)
        own = own.masked_fill(is_on_other_ranks, 0)
        spread = options.label_smoothing / (num_local * group.size)
        wide = logits.to(_wide(logits.dtype))
        weight: Tensor | None = None
        total_weight: Tensor | float = float(num_local * group.size)
        if options.weight is not None:
            weight = options.weight.chunk(group.size)[group.rank].to(wide.dtype)
            total_weight = options.weight.sum().to(wide.dtype)
        picked = wide.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(is_on_other_ranks, 0)
        own_max = wide.amax(-1).clamp_min(torch.finfo(wide.dtype).min)  # all of it may be -inf
        numbers = [own_max, (wide - own_max.unsqueeze(-1)).exp_().sum(-1), picked]
        if spread:
            numbers.append(wide.sum(-1) if weight is None else wide @ weight)
        every = all_gathered(torch.stack(numbers)[None], 0, group)  # (W, 3 or 4, N)
        highest = every[:, 0].amax(0)
        total = (every[:, 1] * (every[:, 0] - highest).exp()).sum(0)
        picked = every[:, 2].sum(0)
        nowhere = (target < 0) | (target >= num_local * group.size)
        spread_total = spread * total_weight

        per_row = (1 - options.label_smoothing) * share
        losses = per_row * (total.log() + (highest - picked.masked_fill(nowhere, torch.nan)))
        if spread:
            losses = losses + spread_total * (total.log() + highest) - spread * every[:, 3].sum(0)
        ctx.save_for_backward(
            logits, highest, total, own, is_on_other_ranks, counted, per_row, weight
        )
        ctx.spread, ctx.spread_total, ctx.group = spread, spread_total, group
        return losses.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, highest, total, own, is_on_other_ranks, counted, per_row, weight = ctx.saved_tensors
        grad = grad.masked_fill(~counted, 0)
        result = (logits.to(total.dtype) - highest.unsqueeze(-1)).exp_()
        if torch.is_grad_enabled():  # to be differentiated once more, by a gradient penalty
            summed = reduce_from_region(result.sum(-1), ctx.group)
            grad, total = copy_to_region(grad, ctx.group), copy_to_region(summed, ctx.group)
        factor = (grad * (per_row + ctx.spread_total) / total).unsqueeze(-1)
        result = result * factor if torch.is_grad_enabled() else result.mul_(factor)
        at_target = (-grad * per_row).masked_fill(is_on_other_ranks, 0)
        result.scatter_add_(-1, own.unsqueeze(-1), at_target.unsqueeze(-1))
        if ctx.spread:
            even = (grad * ctx.spread).unsqueeze(-1)
            result.sub_(even if weight is None else even * weight)
        return result.to(logits.dtype), None, None, None, None, None


Rule = Function


def on_parts(func: Function, args: Any, kwargs: Kwargs) -> Any:
    """Do an operation by its rule; return NotImplemented where no rule fits the call."""
    name = getattr(func, "__name__", "")
    kind: Any = next((one._part for one in found_in(DimShardedTensor, (args, kwargs))), Part)
    rule = kind.own_rules.get(name) or _RULES.get(name)
    if rule is None or not (kind.computes or name in _WITHOUT_ELEMENTS):
        return NotImplemented
    try:
        _signature(rule).bind(func, *args, **kwargs)
    except TypeError:
        return NotImplemented
    return rule(func, *args, **kwargs)


@cache
def _signature(rule: Rule) -> Signature:
    return signature(rule)


def _property(func: Any, sharded: Any, *value: Any) -> Any:
    """Read or set the part's graph and gradient; other properties need the full tensor."""
    if func == Tensor.mT.__get__:  # type: ignore[attr-defined]
        return shapes.transpose(Tensor.transpose, sharded, -2, -1)
    if not isinstance(sharded, DimShardedTensor):  # which gets a value that is sharded
        return NotImplemented
    if func == Tensor.requires_grad.__get__ and sharded.is_in_graph:  # type: ignore[attr-defined]
        return True
    if not value and func not in _OF_THE_PART:
        return NotImplemented
    part: Part = sharded.part
    is_gradient = func in _OF_GRADIENTS
    own: Rule = part.own_gradient if is_gradient else part.narrow
    if not is_gradient:
        value = map_only(AveragedGradient, AveragedGradient.full_tensor, value)
    given = (one if isinstance(one, AveragedGradient) else own(one) for one in value)
    result = func(part.local, *given)
    widen: Rule = part.wide_gradient if is_gradient else part.widen
    # A gradient whose elements lie on several ranks knows them all.
    knows_all = isinstance(result, Tensor) and type(result) not in (Tensor, nn.Parameter)
    return result if knows_all else widen(result)


def _method_of_part(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the part, which gives the part itself, or nothing of its shape."""
    result = func(sharded.part.local, *args, **kwargs)
    return sharded if result is sharded.part.local else result


def _register_hook(func: Any, sharded: Any, hook: Callable[[Tensor], Any]) -> Any:
    part: Part = sharded.part
    return func(part.local, lambda grad: part.own_gradient(hook(part.wide_gradient(grad))))


def _backward(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.backward` from and to the parts, with the parts of the gradients."""
    ends, is_method = _listed(tensors), isinstance(tensors, Tensor)
    grads = kwargs.pop("gradient" if is_method else "grad_tensors", None)
    is_plain = not any(isinstance(one, DimShardedTensor) for one in ends)
    if args or (is_method and not is_plain):
        return NotImplemented
    starts = [None] * len(ends) if grads is None else _listed(grads)
    inputs = kwargs.pop("inputs", None)
    given = [] if inputs is None else [*map(own_part, _listed(inputs))]
    leaves = [isinstance(one, nn.Parameter) and one.requires_grad for one in given]
    # Edges ask nobody: a parameter that user code keeps would be its view again.
    sources = [gradient_edge(p) if is_leaf else p for p, is_leaf in zip(given, leaves, strict=True)]
    ends, starts = [*map(own_part, ends)], [*map(_start, ends, starts)]
    with having(asker, value=Asker.USER):  # blocks may be computed again
        torch.autograd.backward(ends, starts, inputs=None if inputs is None else sources, **kwargs)
    return None


def _start(end: Any, grad: Any) -> Any:
    """Return the gradient that a backward starts with from a tensor or its part."""
    is_part = isinstance(end, DimShardedTensor) and grad is not None
    return end.part.own_gradient(grad) if is_part else full_tensor(grad)


def _grad(
    func: Any,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *args: Any,
    materialize_grads: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `torch.autograd.grad` from and to the parts; edges stand for the parts to go to."""
    if kwargs.get("is_grads_batched"):
        raise transform_refused(OF_RANKS)
    ends, sources = _listed(outputs), _listed(inputs)
    starts = [None] * len(ends) if grad_outputs is None else _listed(grad_outputs)
    parts = [one.part if isinstance(one, DimShardedTensor) else None for one in sources]
    given = [*map(own_part, ends)], [*map(_source, sources)], [*map(_start, ends, starts)]
    unused = kwargs.pop("allow_unused", None) or materialize_grads
    with having(asker, value=Asker.USER):  # blocks may be computed again
        found = func(*given, *args, allow_unused=unused, **kwargs)
    if materialize_grads:
        found = [
            torch.zeros_like(one if part is None else part.local) if grad is None else grad
            for one, part, grad in zip(sources, parts, found, strict=True)
        ]
    return tuple(
        grad if part is None or grad is None else part.wide_gradient(grad)
        for part, grad in zip(parts, found, strict=True)
    )


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _source(tensor: Any) -> Any:
    """Return where a backward stops at a tensor: the edge to its part."""
    part = own_part(tensor)
    return gradient_edge(part) if part is not tensor and part.requires_grad else part


def combined(func: Any, like: DimShardedTensor, args: Any, kwargs: Any) -> Any:
    """Do an operation on the parts that broadcasts its operands along the sharded dimension."""
    part = like.part
    operands = [part.operand(arg) for arg in args]
    if any(operand is NotImplemented for operand in operands):
        return NotImplemented
    result = func(*operands, **kwargs)
    if result is part.local:
        return like
    if not isinstance(result, Tensor) or result.device != like.device:
        return NotImplemented  # on another device the group may be unable to gather it
    return part.widen(result, result.ndim - part.place)


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation whose operands broadcast along the sharded dimension."""
    like = next((arg for arg in args if isinstance(arg, DimShardedTensor)), None)
    changes = writes(func)
    if like is None or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if changes and args[0] is not like:
        return NotImplemented
    result = combined(func, like, args, kwargs)
    if changes and result is not NotImplemented:
        like.note_change()
    return result


def _cast(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast to another type, such as that of another tensor of any shape."""
    args = tuple(one.part.local if isinstance(one, DimShardedTensor) else one for one in args)
    if not isinstance(tensor, DimShardedTensor):
        return func(tensor, *args, **kwargs)
    result = func(tensor.part.local, *args, **kwargs)
    if result is tensor.part.local:
        return tensor
    return tensor.part.widen(result) if result.device == tensor.device else NotImplemented


def _norm(func: Any, sharded: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Do layer_norm or rms_norm of rows that are full on each rank."""
    if not isinstance(sharded, DimShardedTensor):
        return NotImplemented
    part = sharded.part
    if part.dim >= sharded.ndim - len(normalized_shape):
        return NotImplemented
    args = tuple(part.shared(arg) for arg in args)
    kwargs = {name: part.shared(arg) for name, arg in kwargs.items()}
    return part.widen(func(part.local, normalized_shape, *args, **kwargs))


def reduced(func: Any, sharded: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Take a mean or sum along dimensions that are not sharded."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    part: Part = sharded.part
    places = {one % sharded.ndim for one in dims}
    if not places or part.dim in places or "out" in kwargs:
        return NotImplemented
    result = func(part.local, dim, *args, **kwargs)
    return shapes.widened(part, result, places)


def _dropout(
    func: Any,
    input: Any,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """Drop out as a single device would: the full mask is drawn from the common stream."""
    if not training or p == 0:
        return input
    part: Part = input.part
    strides = part.local.stride()
    order = sorted(range(input.ndim), key=lambda dim: -strides[dim])  # of drawing: that of memory
    drawn = func(part.local.new_ones([input.shape[dim] for dim in order]), p, True)
    mask = part.narrow(drawn.permute([order.index(dim) for dim in range(input.ndim)])).clone()
    if inplace:
        input.note_change()
    return part.widen(part.local.mul_(mask) if inplace else part.local * mask)


def _cross_entropy(
    func: Any,
    input: Any,  # noqa: A002 - torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_legacy = size_average is not None or reduce is not None
    if not isinstance(input, DimShardedTensor) or is_legacy or target.is_floating_point():
        return NotImplemented
    part = input.part
    is_of_classes = part.dim == min(1, input.ndim - 1) and part.num_blocks == 1
    if not is_of_classes or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    options = LossOptions(
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return parallel_cross_entropy(part.local.movedim(part.dim, -1), target, options, part.group)


def matmul(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply the matrices of each head."""
    like = left if isinstance(left, DimShardedTensor) else right
    if like.part.place <= 2 or kwargs or min(left.ndim, right.ndim) < 2:
        return NotImplemented
    return combined(func, like, (left, right), {})


def attend(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Do scaled_dot_product_attention; each rank drops out weights of its own heads."""
    if not all(isinstance(one, DimShardedTensor) for one in (query, key, value)):
        return NotImplemented
    parts: list[Part] = [one.part for one in (query, key, value)]
    part = parts[0]
    is_grouped = kwargs.get("enable_gqa", False)
    if part.place <= 2 or not all(
        one.is_like(part) and (is_grouped or one.width == part.width) for one in parts
    ):
        return NotImplemented
    mask = part.operand(attn_mask)
    if mask is NotImplemented:
        return NotImplemented
    local = [one.local for one in parts]
    options = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
    with drawn_apart(part.group, part.local.device) if dropout_p else nullcontext():
        return part.widen(func(*local, **options, **kwargs))


_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Do einsum with this rank's part along a letter that is one of the result's.

    bhqd, bhkd -> bhqk     heads of this rank
    bqhd, bkhd -> bhqk     q of this rank's positions, all keys, which are gathered
    """
    is_listed = len(operands) == 1 and isinstance(operands[0], list | tuple)
    tensors = operands[0] if is_listed else operands
    letters = _letters(equation, tensors) if isinstance(equation, str) else None
    if letters is None:
        return NotImplemented
    inputs, output = letters
    terms = [*zip(inputs, tensors, strict=True)]
    parts = [(each, one.part) for each, one in terms if isinstance(one, DimShardedTensor)]
    found = ((part, each[part.dim]) for each, part in parts if each[part.dim] in output)
    like, letter = next(found, (None, ""))
    own = [] if like is None else [_term(like, letter, each, one) for each, one in terms]
    if like is None or any(one is NotImplemented for one in own):
        return NotImplemented
    return like.widen(func(",".join(inputs) + "->" + output, *own), output.index(letter))


def _term(like: Part, letter: str, letters: str, value: Tensor) -> Any:
    """Return what this rank needs of an operand for its part along a letter."""
    dim = letters.find(letter)
    if isinstance(value, DimShardedTensor) and value.part.dim == dim:
        other = value.part
        own = (other.width, other.num_blocks, other.local.shape[dim])
        is_alike = own == (like.width, like.num_blocks, like.local.shape[like.dim])
        return other.local if is_alike and other.group is like.group else NotImplemented
    if dim < 0:
        return like.full_operand(value)
    if isinstance(value, DimShardedTensor):
        return NotImplemented
    if value.shape[dim] == 1:
        return like.shared(value)
    return like.split(value, dim) if value.shape[dim] == like.width else NotImplemented


def _letters(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """Return the letters of each operand and of the result, those of an ellipsis included."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or len(inputs) != len(tensors):
        return None
    spare = [one for one in _SPARE if one not in equation]
    most = 0
    for place, (each, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        num_more = tensor.ndim - len(each.replace("...", ""))
        if "..." in each:
            most = max(most, num_more)
            each = inputs[place] = each.replace("...", "".join(spare[:num_more][::-1]))
        if len(each) != tensor.ndim or len(set(each)) < len(each):
            return None
    return inputs, output.replace("...", "".join(spare[:most][::-1]))


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """Return a rule by the names of its operations, which blanks part."""
    return dict.fromkeys(names.split(), rule)


_WITHOUT_ELEMENTS = named(_property, "__get__ __set__") | named(
    _method_of_part,
    "requires_grad_ retain_grad is_contiguous new_empty new_zeros new_ones new_full new_tensor",
)
_RULES: dict[str, Rule] = {
    **_WITHOUT_ELEMENTS,
    "detach_": _method_of_part,
    **named(_backward, "backward"),
    **named(_grad, "grad"),
    **named(_register_hook, "register_hook"),
    **named(_cast, "to type_as float double half bfloat16"),
    **named(
        elementwise,
        "contiguous clone detach where "
        "rsqrt sqrt square reciprocal relu gelu silu "
        "add sub mul div true_divide pow neg abs exp tanh sigmoid clamp masked_fill nan_to_num "
        "add_ sub_ mul_ div_ tanh_ clamp_ masked_fill_ "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
        "__rdiv__ __pow__ __neg__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__",
    ),
    **named(_norm, "layer_norm rms_norm"),
    **named(reduced, "mean sum"),
    **named(_dropout, "dropout"),
    **named(shapes.along, "softmax log_softmax narrow"),
    **named(matmul, "matmul bmm __matmul__"),
    **named(attend, "scaled_dot_product_attention"),
    **named(einsum, "einsum"),
    **named(shapes.view, "view reshape"),
    **named(shapes.flatten, "flatten"),
    **named(shapes.unflatten, "unflatten"),
    **named(shapes.transpose, "transpose swapaxes swapdims"),
    **named(shapes.permute, "permute"),
    **named(shapes.unsqueeze, "unsqueeze"),
    **named(shapes.squeeze, "squeeze"),
    **named(shapes.expand, "expand"),
    **named(shapes.repeat_interleave, "repeat_interleave"),
    **named(shapes.split, "split chunk"),
    **named(shapes.unbind, "unbind"),
    **named(shapes.as_pairs, "view_as_complex view_as_real"),
    **named(shapes.joined, "cat concat stack"),
    **named(shapes.getitem, "__getitem__"),
    **named(_cross_entropy, "cross_entropy"),
}


_OF_GRADIENTS = functions("grad grad=")
_OF_THE_PART = OF_OBJECT | {GET_DATA}

DimShardedTensor.on_parts = staticmethod(on_parts)
