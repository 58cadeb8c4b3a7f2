"""The tensor that user code reads from a sharded parameter: it looks full, and gives right results.

    shard.mul_(2), shard + other      element by element, on each rank's elements; nothing is sent
    shard.norm(), shard.max()         combined over the ranks: one number, the same on every rank
    shard[0], shard.T                 a `ShardView`, which reads and writes the elements it shows
    shard[0].zero_(), shard @ x       on a full copy; what is changed in it goes back to the shards

A gradient refuses operations that cannot be computed from its shards; a parameter is unsharded for
the one operation, tensor by tensor. Each rank must do the same, in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.core.tensor_calls import (
    BY_PYTHON,
    GET_DATA,
    MADE_OF_ALL,
    MOVES_MEMORY,
    OF_FORMAT,
    OF_GRAPH,
    OF_MEMORY,
    OF_OBJECT,
    OF_SHAPE,
    PICKLES,
    SET_DATA,
    SET_GRAD,
    Args,
    Exchanged,
    Function,
    Kwargs,
    SeesCalls,
    SeesOperations,
    found_in,
    map_only,
    name_of,
    written_by,
)
from lightning_shard.data_parallel.torch_private import (
    MAY_SHARE_DATA,
    in_backward,
    is_composite,
    outside_transforms,
    storage_key,
    wraps_tensors,
)
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_tensor import NotShardedError, ShardedTensor
from lightning_shard.data_parallel.views.transforms import refuse_recording
from lightning_shard.errors import ConfigError

_Call = tuple[Function, Args, Kwargs]


class _ComputedInFull(SeesCalls, SeesOperations):
    """Tensors of which user code computes as with full ones."""

    @classmethod
    @override
    def called(cls, func: Function, types: Sequence[type], args: Args, kwargs: Kwargs) -> Any:
        """See to what never reaches `dispatched`, and to graphs."""
        if any(issubclass(one, nn.Parameter) for one in types):
            return NotImplemented  # together with a sharded parameter, which knows what to do
        refuse_recording()
        with torch._C.DisableTorchFunctionSubclass():
            return computed(func, args, kwargs)


class ParameterShard(_ComputedInFull, ShardedTensor):  # type: ignore[misc]
    """Looks like a full parameter, or a result of one, of which this rank has `local`."""

    gathers = True

    def full_tensor(self) -> Tensor:
        """Return the full tensor on every rank; each rank must call."""
        return super().full_tensor().to(self.device)

    @classmethod
    @override
    def dispatched(cls, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Compute in shards, over the ranks, or on full copies."""
        if is_composite(func):
            return func.decompose(*args, **kwargs)  # as under inference mode
        for base in _bases(written_by(func, args, kwargs)):
            base.spread.lent.changed()
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not (is_random or found_in(ShardView, lists) or _meets_a_ranks_own(args, kwargs)):
            try:
                return super().dispatched(func, args, kwargs)
            except NotShardedError:
                pass  # decided by what is alike on all ranks, before anything was sent
        if func.is_view and isinstance(args[0], ParameterShard):
            return _views(args[0], (), func, args, kwargs)
        return on_full_copies(func, args, kwargs)


def _meets_a_ranks_own(*given: Any) -> bool:
    """Whether there are tensors of a backward, of which other ranks have other elements."""
    return in_backward() and any(
        type(one) is Tensor and one.dim() for one in found_in(Tensor, given)
    )


@dataclass(frozen=True)
class _Step:
    """One operation of a view, such as an index."""

    func: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    index: int | None

    def __call__(self, tensor: Tensor) -> Tensor:
        result = self.func(tensor, *self.args, **self.kwargs)
        chosen: Tensor = result if self.index is None else result[self.index]
        return chosen


class ShardView(_ComputedInFull):
    """Some elements of a `ParameterShard`, by the `steps` that take them from the full tensor.

    They are brought together whenever they are used.
    """

    base: ParameterShard
    steps: tuple[_Step, ...]

    @staticmethod
    def __new__(cls, like: Tensor, base: ParameterShard, steps: tuple[_Step, ...]) -> "ShardView":
        """Make one of the shape and strides of `like`."""
        view: ShardView = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=base.device,
        )
        view.base, view.steps = base, steps
        return view

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardView(of={self.base.spread.name!r}, shape={tuple(self.shape)})"

    def taken_from(self, full: Tensor) -> Tensor:
        """Return the elements as a view of the full tensor."""
        for step in self.steps:
            full = step(full)
        return full

    def full_tensor(self) -> Tensor:
        """Return a copy of the elements; each rank must call."""
        return self.taken_from(self.base.full_tensor()).clone()

    @classmethod
    @override
    def dispatched(cls, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Look at other elements, or compute on full copies."""
        if is_composite(func):
            return func.decompose(*args, **kwargs)
        if func.is_view and isinstance(args[0], ShardView):
            return _views(args[0].base, args[0].steps, func, args, kwargs)
        return on_full_copies(func, args, kwargs)


_OF_WRAPPER = OF_FORMAT | OF_SHAPE | OF_OBJECT | OF_GRAPH | {SET_GRAD, MAY_SHARE_DATA}
NEEDS_FULL = PICKLES | MOVES_MEMORY
"""Calls that are refused, by `name_of`: see `pickling_refused`."""


def computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute what user code asks for with shards among the arguments."""
    if func in _OF_WRAPPER:
        return func(*args, **kwargs)
    name = name_of(func)
    gradients = Exchanged(AveragedGradient, AveragedGradient.sharded)
    args, kwargs = gradients.given((args, kwargs))
    for base in _bases((args, kwargs)):
        base.spread.lent.take_back(base)
    if func == GET_DATA:
        return args[0].detach()
    if func == SET_DATA or name in BY_PYTHON:
        return _written(func, args)
    if name == "deepcopy":
        return args[0].clone()
    if name in NEEDS_FULL:
        raise pickling_refused(_bases(args)[0].spread.name, name)
    if name in OF_MEMORY:
        return func(*map_only(Tensor, partial(_lent, name), args), **kwargs)
    if name in MADE_OF_ALL or _is_in_graph(args, kwargs) or wraps_tensors():
        with outside_transforms():
            args, kwargs = map_only(Tensor, _full, (args, kwargs))
    return gradients.returned(func(*args, **kwargs))


def _written(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """Write what is assigned to the data of a tensor, or what Python makes of its elements."""
    if func != SET_DATA:
        return args[0].copy_(func(*map(_full, args)))  # type: ignore[no-any-return]
    if _base(args[0]) is None:  # its memory is held by an object, as that of an array is
        func(args[0], _lent("array", args[1]))
        return None
    with torch.no_grad():  # as torch sets data
        args[0].copy_(args[1])
    return None


def pickling_refused(name: str, function: str) -> ConfigError:
    """Return the error for a shard that is to be pickled, or moved to other memory."""
    what = f"moved by {function}()" if function in MOVES_MEMORY else "pickled"
    return ConfigError(
        f"What was read of the parameter {name!r} lies in shards on the ranks and is to be "
        f"{what}, expected full tensors. Take them on every rank with .full_tensor(), save with "
        f"trainer.save_checkpoint, or put it into the checkpoint in on_save_checkpoint."
    )


def _base(value: Any) -> ShardedTensor | None:
    """Return the sharded tensor that a value is or shows; None for any other."""
    base = value.base if isinstance(value, ShardView) else value
    return base if isinstance(base, ShardedTensor) else None


def _bases(given: Any) -> list[ShardedTensor]:
    """Return the sharded tensors that values are or show."""
    found = found_in((ShardView, ShardedTensor), given)
    return [one.base if isinstance(one, ShardView) else one for one in found]


def _lent(function: str, tensor: Tensor) -> Tensor:
    """Return a tensor with memory of its own in the place of a shard or a view of one."""
    base = _base(tensor)
    if base is None:
        return tensor
    full = base.spread.lent.of(base, function)
    return tensor.taken_from(full) if isinstance(tensor, ShardView) else full


def _full(tensor: Any) -> Any:
    if not isinstance(tensor, (ShardedTensor, ShardView)):
        return tensor
    full: Tensor = _Joined.apply(tensor)  # type: ignore[no-untyped-call]
    return full


class _Joined(torch.autograd.Function):
    """The full tensor, for a graph of the user's that begins at a shard, as `jacobian`'s does."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _full(tangents[0])


def _is_in_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd would record the operation, for which shards are no use."""
    if not torch.is_grad_enabled():
        return False
    return any(one.requires_grad for one in found_in(Tensor, (args, kwargs)))


def _views(
    base: ParameterShard, before: tuple[_Step, ...], func: Any, args: Any, kwargs: Any
) -> Any:
    """Look at elements without bringing them together."""
    seen = args[0]
    like = torch.empty(base.numel(), dtype=base.dtype, device="meta")
    like = like.view(seen.dtype).as_strided(seen.shape, seen.stride(), seen.storage_offset())
    results = func(like, *args[1:], **kwargs)

    def view(one: Tensor, index: int | None) -> ShardView:
        return ShardView(one, base, (*before, _Step(func, tuple(args[1:]), kwargs, index)))

    if isinstance(results, Tensor):
        return view(results, None)
    return [view(one, index) for index, one in enumerate(results)]


def on_full_copies(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on full copies, and carry changes of them over to the shards; each rank must call."""
    written = written_by(func, args, kwargs)
    is_random = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
    overwrites = is_random and len(_bases((args, kwargs))) == 1
    fulls: dict[tuple[int, int], Tensor] = {}

    def full(base: ShardedTensor) -> Tensor:
        key = _elements(base)
        if key not in fulls:
            unread = overwrites and base is args[0]
            fulls[key] = base.local.new_empty(base.shape) if unread else base.full_tensor().clone()
        return fulls[key].view(base.shape)

    def value(one: ShardView | ShardedTensor) -> Tensor:
        return one.taken_from(full(one.base)) if isinstance(one, ShardView) else full(one)

    values = Exchanged((ShardView, ShardedTensor), value)
    full_args, full_kwargs = values.given((tuple(args), kwargs))
    result = func(*full_args, **full_kwargs)
    for base in _bases(written):
        base.take_over(fulls[_elements(base)])
    return values.returned(result)


def _elements(base: ShardedTensor) -> tuple[int, int]:
    """Return what is the same for all that show one tensor's elements."""
    return id(base.spread), storage_key(base.local)
