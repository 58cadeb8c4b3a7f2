"""Which operations leave a `PartedTensor` in parts: a rule for each, by the operation's name.

A rule is called as the operation is, and returns `NotImplemented` where the result would need the
other ranks' parts. Rules see no values, only shapes, so every rank decides alike.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.tensor_parallel.cross_entropy import LossOptions, parallel_cross_entropy
from lightning_shard.tensor_parallel.parted_tensor import Part, PartedTensor, made_whole, writes
from lightning_shard.tensor_parallel.regions import copy_to_region, split_to_region

Rule = Callable[..., Any]


def rule_of(func: Callable[..., Any]) -> Rule:
    """Return the rule of an operation; that of an unknown one declines."""
    return _RULES.get(getattr(func, "__name__", ""), _decline)


def _decline(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _property(func: Any, parted: Any, *value: Any) -> Any:
    """Graph and gradient are the part's; other properties are worked out from the whole."""
    if func == Tensor.mT.__get__:  # type: ignore[attr-defined]
        return _transpose(Tensor.transpose, parted, -2, -1)
    if func == Tensor.requires_grad.__get__ and parted.is_in_graph:  # type: ignore[attr-defined]
        return True
    if not value and func not in _OF_THE_PART:
        return NotImplemented
    part: Part = parted.part
    return part.widen(func(part.local, *map(part.narrow, value)))


def _method_of_part(func: Any, parted: Any, *args: Any, **kwargs: Any) -> Any:
    result = func(parted.part.local, *args, **kwargs)
    return parted if result is parted.part.local else result


def _register_hook(func: Any, parted: Any, hook: Callable[[Tensor], Any]) -> Any:
    part: Part = parted.part
    return func(part.local, lambda grad: part.narrow(hook(part.widen(grad))))


def _backward(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward` goes back from the parts, with the parts of the gradients."""
    grads = kwargs.pop("grad_tensors", None)
    if isinstance(tensors, Tensor) or grads is None or args:
        return NotImplemented
    parts = [one.part if isinstance(one, PartedTensor) else None for one in tensors]
    return func(
        [t if part is None else part.local for t, part in zip(tensors, parts, strict=True)],
        [made_whole(g) if p is None else p.narrow(g) for g, p in zip(grads, parts, strict=True)],
        **kwargs,
    )


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    like = next((arg for arg in args if isinstance(arg, PartedTensor)), None)
    changes = writes(func)
    if like is None or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if changes and args[0] is not like:
        return NotImplemented
    place = like.ndim - like.part.dim  # from the end, as shapes are broadcast
    operands = [_operand(arg, like, place) for arg in args]
    if any(operand is NotImplemented for operand in operands):
        return NotImplemented
    result = func(*operands, **kwargs)
    if changes:
        like.note_change()
    elif result is like.part.local:
        return like
    if result.device != like.device:  # where the group may be unable to gather it
        return NotImplemented
    return like.part.widen(result, result.ndim - place)


def _operand(arg: Any, like: PartedTensor, place: int) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    width = like.shape[like.part.dim]
    if isinstance(arg, PartedTensor):
        is_alike = arg.ndim - arg.part.dim == place and arg.part.group is like.part.group
        return arg.part.local if is_alike else NotImplemented
    if arg.ndim < place or arg.shape[-place] == 1:
        return _shared(arg, like.part)
    if arg.shape[-place] != width:
        return NotImplemented
    return split_to_region(arg, arg.ndim - place, like.part.group)


def _shared(value: Any, part: Part) -> Any:
    """Return what every rank uses for its part: each rank knows a part of the gradient only."""
    follows = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    return copy_to_region(value, part.group) if follows else value


def _norm(func: Any, parted: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """layer_norm and rms_norm of rows that are whole here."""
    if not isinstance(parted, PartedTensor):
        return NotImplemented
    part = parted.part
    if part.dim >= parted.ndim - len(normalized_shape):
        return NotImplemented
    args = tuple(_shared(arg, part) for arg in args)
    kwargs = {name: _shared(arg, part) for name, arg in kwargs.items()}
    return part.widen(func(part.local, normalized_shape, *args, **kwargs))


def _reduce(func: Any, parted: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A mean or sum along other dimensions."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    part: Part = parted.part
    places = {one % parted.ndim for one in dims}
    if not places or part.dim in places or "out" in kwargs:
        return NotImplemented
    result = func(part.local, dim, *args, **kwargs)
    is_kept = result.ndim == parted.ndim
    return part.widen(result, part.dim - (0 if is_kept else sum(p < part.dim for p in places)))


def _dropout(
    func: Any,
    input: Any,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """Zero what a single device would: the mask is drawn for the whole, from the common stream."""
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


def _view(func: Any, parted: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    part: Part = parted.part
    if -1 in sizes:
        rest = -math.prod(sizes)
        if rest <= 0:
            return NotImplemented
        sizes[sizes.index(-1)] = parted.numel() // rest
    if part.dim != parted.ndim - 1 or sizes[-1] != parted.shape[-1]:
        return NotImplemented
    return part.widen(func(part.local, (*sizes[:-1], part.local.shape[-1])), len(sizes) - 1)


def _flatten(func: Any, parted: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    part: Part = parted.part
    if part.dim != parted.ndim - 1 or end_dim % parted.ndim >= part.dim:
        return NotImplemented
    result = func(part.local, start_dim, end_dim)
    return part.widen(result, result.ndim - 1)


def _transpose(
    func: Any, parted: Any, dim0: int | None = None, dim1: int | None = None, **_: Any
) -> Any:
    if dim0 is None or dim1 is None:
        return NotImplemented
    part: Part = parted.part
    swapped = {dim0 % parted.ndim: dim1 % parted.ndim, dim1 % parted.ndim: dim0 % parted.ndim}
    return part.widen(func(part.local, dim0, dim1), swapped.get(part.dim, part.dim))


def _permute(func: Any, parted: Any, *dims: Any, **kwargs: Any) -> Any:
    order = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
    if isinstance(order, int):
        return NotImplemented
    part: Part = parted.part
    places = [dim % parted.ndim for dim in order]
    return part.widen(func(part.local, places), places.index(part.dim))


def _unsqueeze(func: Any, parted: Any, dim: int) -> Any:
    part: Part = parted.part
    place = dim % (parted.ndim + 1)
    return part.widen(func(part.local, place), part.dim + (place <= part.dim))


def _squeeze(func: Any, parted: Any, *dim: Any, **_: Any) -> Any:
    part: Part = parted.part
    if len(dim) != 1 or not isinstance(dim[0], int) or dim[0] % parted.ndim == part.dim:
        return NotImplemented
    result = func(part.local, dim[0])
    is_before = dim[0] % parted.ndim < part.dim and result.ndim < parted.ndim
    return part.widen(result, part.dim - is_before)


def _pieces(func: Any, parted: Any, size: Any = None, dim: int = 0, **_: Any) -> Any:
    """Split or chunk along another dimension."""
    part: Part = parted.part
    if size is None or dim % parted.ndim == part.dim:
        return NotImplemented
    return tuple(part.widen(piece) for piece in func(part.local, size, dim))


def _narrow(func: Any, parted: Any, dim: int, start: Any, length: int) -> Any:
    part: Part = parted.part
    if dim % parted.ndim == part.dim:
        return NotImplemented
    return part.widen(func(part.local, dim, start, length))


def _getitem(func: Any, parted: Any, index: Any) -> Any:
    """An index that leaves the last dimension as it is."""
    part: Part = parted.part
    entries = list(index) if isinstance(index, tuple) else [index]
    if part.dim != parted.ndim - 1 or not all(map(_is_plain, entries)):
        return NotImplemented
    gap = next((i for i, one in enumerate(entries) if one is Ellipsis), None)
    named = entries if gap is None else entries[gap + 1 :]
    covers_last = sum(map(_dims_of, named)) >= (parted.ndim if gap is None else 1)
    if covers_last:
        is_full = isinstance(named[-1], slice) and named[-1] == slice(None)
    else:
        is_full = gap is None or not named
    if not is_full:
        return NotImplemented
    result = func(part.local, index)
    return part.widen(result, result.ndim - 1)


def _is_plain(entry: Any) -> bool:
    """Whether an index's entry is one whose dimensions `_dims_of` tells."""
    if isinstance(entry, list):
        return all(type(one) is int for one in entry)
    is_known = entry is None or entry is Ellipsis or isinstance(entry, int | slice | Tensor)
    return is_known and not isinstance(entry, PartedTensor)


def _dims_of(entry: Any) -> int:
    """How many dimensions an index's entry stands for."""
    if entry is None or isinstance(entry, bool):
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


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
    if not isinstance(input, PartedTensor) or is_legacy or target.is_floating_point():
        return NotImplemented
    part = input.part
    if part.dim != min(1, input.ndim - 1) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    options = LossOptions(
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return parallel_cross_entropy(part.local.movedim(part.dim, -1), target, options, part.group)


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    **_named(_property, "__get__ __set__"),
    **_named(_method_of_part, "requires_grad_ retain_grad is_contiguous"),
    **_named(_backward, "backward"),
    **_named(_register_hook, "register_hook"),
    **_named(
        _elementwise,
        "to type_as float double half bfloat16 contiguous clone detach "
        "rsqrt sqrt square reciprocal relu gelu silu "
        "add sub mul div true_divide pow neg abs exp tanh sigmoid clamp masked_fill nan_to_num "
        "add_ sub_ mul_ div_ tanh_ clamp_ masked_fill_ "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
        "__rdiv__ __pow__ __neg__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__",
    ),
    **_named(_norm, "layer_norm rms_norm"),
    **_named(_reduce, "mean sum"),
    **_named(_dropout, "dropout"),
    **_named(_view, "view reshape"),
    **_named(_flatten, "flatten"),
    **_named(_transpose, "transpose swapaxes swapdims"),
    **_named(_permute, "permute"),
    **_named(_unsqueeze, "unsqueeze"),
    **_named(_squeeze, "squeeze"),
    **_named(_pieces, "split chunk"),
    **_named(_narrow, "narrow"),
    **_named(_getitem, "__getitem__"),
    **_named(_cross_entropy, "cross_entropy"),
}


def _getters(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


_OF_THE_PART = _getters("data grad grad_fn is_leaf requires_grad retains_grad _version output_nr")

IS_OF_WRAPPER = {
    *_getters("shape ndim dtype device layout is_cuda is_cpu itemsize nbytes is_sparse"),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel),
    *(Tensor.__len__, Tensor.stride, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.__hash__),
}
"""What the wrapper answers itself: shapes and types are the whole's; memory it has none."""
