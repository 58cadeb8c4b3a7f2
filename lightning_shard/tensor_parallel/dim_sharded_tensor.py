"""A tensor of which each rank has a part along one dimension, and which looks full to user code.

    head ──► part (B, T, V / W) ──► DimShardedTensor of shape (B, T, V)
                                        │ flatten, view, slices of B and T, float(), / 2 ...
                                        ├──────────────► DimShardedTensor, nothing is exchanged
                                        │ cross_entropy
                                        ├──────────────► the loss, of a few numbers per row
                                        │ anything else (argmax, softmax, numpy ...)
                                        └─ all-gather ─► a plain tensor of shape (B, T, V)

Logits are sharded by their classes, activations under sequence parallel by their positions, query,
key and value by heads. Fused in one tensor, each rank has a part of each of the three blocks:

    [ q0 q1 | k0 k1 | v0 v1 ]       rank 1 has [ q1 k1 v1 ], num_blocks is 3

`dim_sharded_operations` says which operations work on the parts. Those that get past
`__torch_function__`, in an autograd function of the user's or in C++, see a full tensor: the
wrapper is a node of the graph that cuts the gradient, and `__torch_dispatch__` gathers its values.
Because a gather is collective, each rank must do the same with its part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.core.tensor_calls import (
    BY_ADDRESS,
    MOVES_MEMORY,
    OF_FORMAT,
    OF_GRAPH,
    OF_OBJECT,
    OF_SHAPE,
    SET_DATA,
    Exchanged,
    Function,
    Kwargs,
    changed_by,
    found_in,
    functions,
    map_only,
    memory_refused,
    name_of,
    writes,
)
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.data_parallel.recompute.recomputation import TakenApart, take_apart_by
from lightning_shard.data_parallel.torch_private import storage_key, untraced
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.transforms import OF_RANKS, refuse_transforms
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.regions import (
    all_gathered,
    copy_to_region,
    gather_copies,
    own_slice,
    split_to_region,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of a wider tensor.

    Attributes:
        local: This rank's elements: full shape, but for dimension `dim`, of which it has 1 / W.
        dim: The sharded dimension, counted from 0.
        group: Group of the W ranks that have the parts.
        num_blocks: Number of equal blocks along `dim`, of each of which a rank has 1 / W.
        weight: The parameter that a step reads, or has computed this from; None if it is unknown.
        own_rules: Rules by operation that go before those of `dim_sharded_operations`.
        computes: Whether operations are done on it, and not only what needs no elements.
        has_own_rows: Whether each rank computes its rows of a result, with the same parameters.
    """

    own_rules: ClassVar[Mapping[str, Function]] = {}
    computes: ClassVar[bool] = True
    has_own_rows: ClassVar[bool] = False

    local: Tensor
    dim: int
    group: Collectives
    num_blocks: int = 1
    weight: Tensor | None = None

    @property
    def place(self) -> int:
        """Position of `dim` counted from the end, as shapes are broadcast."""
        return self.local.ndim - self.dim

    @property
    def width(self) -> int:
        """Size of the full tensor along `dim`."""
        return self.local.shape[self.dim] * self.group.size

    @property
    def full_shape(self) -> Sequence[int]:
        """Shape of the full tensor."""
        shape = list(self.local.shape)
        shape[self.dim] = self.width
        return shape

    def own_length(self, length: int) -> int | None:
        """Return how much of a block of `length` a rank has; None if it is not shared like this."""
        own, rest = divmod(length, self.group.size)
        return None if rest else own

    def is_like(self, other: "Part") -> bool:
        """Whether ranks have the same slices of both when they are broadcast to one shape."""
        own = (self.place, self.num_blocks)
        return own == (other.place, other.num_blocks) and self.group is other.group

    def widen(self, local: Any, dim: int | None = None, num_blocks: int | None = None) -> Any:
        """Return a result computed from this part as a wider tensor; other values as they are."""
        if not isinstance(local, Tensor):
            return local
        place = self.dim if dim is None else dim % local.ndim
        num_blocks = num_blocks or self.num_blocks
        return wrapped(replace(self, local=local, dim=place, num_blocks=num_blocks))

    def narrow(self, value: Any) -> Any:
        """Return this rank's part of a tensor of the full shape; other values as they are."""
        if isinstance(value, DimShardedTensor):
            return value.part.local
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad and torch.is_grad_enabled():  # its gradient is of all ranks' parts
            return self.split(value, self.dim)
        return self._by_block(own_slice, value, self.dim)

    def note_gather(self, func: Function) -> None:
        """Hear of an operation that needs the full tensor."""

    def wide_gradient(self, local: Any) -> Any:
        """Return the gradient of the wider tensor, of which `local` is the part's."""
        return self.widen(local)

    def own_gradient(self, value: Any) -> Any:
        """Return the part's gradient where `value` is the wider tensor's."""
        return self.narrow(value)

    def split(self, value: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a replicated tensor along `dim`."""
        return self._by_block(split_to_region, value, dim)

    def gather(self) -> Tensor:
        """Return the full tensor, as a replicated tensor; each rank must call."""
        return self._by_block(gather_copies, self.local, self.dim)

    def gather_detached(self) -> Tensor:
        """Return the values of the full tensor; each rank must call."""
        return self._by_block(all_gathered, self.local.detach(), self.dim)

    def shared(self, value: Any) -> Any:
        """Return a value that every rank uses for its part, with its gradient summed over ranks."""
        follows = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return copy_to_region(value, self.group) if follows else value

    def operand(self, value: Any) -> Any:
        """Return the operand that is broadcast with this part; or NotImplemented."""
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DimShardedTensor):
            is_alike = value.part.is_like(self) and value.part.width == self.width
            return value.part.local if is_alike else NotImplemented
        if value.ndim < self.place or value.shape[-self.place] == 1:
            return self.shared(value)
        if value.shape[-self.place] != self.width:
            return NotImplemented
        return self.split(value, value.ndim - self.place)

    def full_operand(self, value: Any) -> Any:
        """Return a full operand for this rank's part of a result; or NotImplemented."""
        return NotImplemented if isinstance(value, DimShardedTensor) else self.shared(value)

    def _by_block(
        self, function: Callable[[Tensor, int, Collectives], Tensor], tensor: Tensor, dim: int
    ) -> Tensor:
        """Apply `function` along each block of a dimension."""
        if self.num_blocks == 1:
            return function(tensor, dim, self.group)
        blocks: Tensor = tensor.unflatten(dim, (self.num_blocks, -1))  # type: ignore[no-untyped-call]
        return function(blocks, dim + 1, self.group).flatten(dim, dim + 1)


@untraced
def from_local(local: Tensor, group: Collectives, dim: int = -1, num_blocks: int = 1) -> Tensor:
    """Make a tensor that looks full of each rank's part, without sending anything."""
    if group.size == 1:
        return local
    place: dict[str, Any] = {"dim": dim % local.ndim, "num_blocks": num_blocks}
    return wrapped(Part(local=local, group=group, **place))


@untraced
def wrapped(part: Part) -> Tensor:
    """Make a tensor that looks full of a part, without sending anything."""
    refuse_transforms(OF_RANKS)
    link = _Link()
    wide: Any = _Widen.apply(part.local, part, link)  # type: ignore[no-untyped-call]
    wide._part, wide._link = part, link
    return wide  # type: ignore[no-any-return]


@untraced
def own_features(tensor: Tensor, group: Collectives) -> Tensor:
    """Return this rank's part, along the last dimension, of a full or so sharded tensor."""
    if isinstance(tensor, DimShardedTensor):
        part = tensor.part
        if (part.place, part.num_blocks) == (1, 1) and part.group is group:
            return part.local
    return split_to_region(full_tensor(tensor), -1, group)


def full_tensor(value: Any) -> Any:
    """Return a value with every `DimShardedTensor` in it gathered; each rank must call."""
    if not found_in(DimShardedTensor, value):
        return value
    return map_only(DimShardedTensor, _gather, value)


class DimShardedTensor(Tensor):
    """A tensor of which this rank has a part; see the module.

    What it knows lies in slots: its `__dict__` is that of the parameter that it shows.
    """

    __slots__ = ("_is_param", "_link", "_part", "_shown")
    _part: Part
    _link: "_Link"
    _shown: Tensor
    on_parts: ClassVar[Function]
    """Does an operation by a rule of `dim_sharded_operations`, which registers this here."""

    @property
    def part(self) -> Part:
        """This rank's part of the tensor."""
        if torch.is_grad_enabled() and not self._part.local.requires_grad and self.is_in_graph:
            # An autograd function has returned it that makes it without gradients: a checkpoint.
            self._part = replace(self._part, local=_Narrow.apply(self))  # type: ignore[no-untyped-call]
        return self._part

    def take_over(self, full: Tensor) -> None:
        """Write this rank's part of a full tensor, such as one that was gathered and changed."""
        part = self.part
        part.local.copy_(part.split(full.to(part.local.dtype), part.dim))
        self.note_change()

    def note_change(self) -> None:
        """Remember that the part was changed in place: the wrapper's gradient is not its own."""
        self._link.is_broken = True

    def cross_with_part(
        self, group: Collectives, crossing: Callable[..., Tensor], args: tuple[Any, ...]
    ) -> Any:
        """Let the part cross into or out of a region of another group, as `PASSES_ON` says."""
        part = self.part
        dims = [one % self.ndim for one in args if isinstance(one, int)]
        if part.group is group or part.dim in dims:
            return None
        return part.widen(crossing(part.local, *args))

    @property
    def __deepcopy__(self) -> Any:  # before what an attribute says, which copies this rank's part
        return partial(_copied, self)

    @property
    def is_in_graph(self) -> bool:
        """Whether autograd knows the wrapper."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # never a collective call
        return f"DimShardedTensor(shape={tuple(self.shape)}, part={self.part.local!r})"

    @classmethod
    @untraced  # traced by dynamo, `numel()` of a sharded tensor became the tensor itself
    @having(asker, value=Asker.ENGINE)
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation on the part where a rule allows it, else on the gathered full tensor."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if _writes_several(func, args):
            return _in_turn(func, args, kwargs)
        if func in BY_ADDRESS:
            raise memory_refused(func, args[0], "each rank of a layer has a part of it")
        if AveragedGradient in types and getattr(func, "__name__", "") != "__set__":
            return _with_gradients(func, args, kwargs)
        if func in OF_WRAPPER:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = cls.on_parts(func, args, kwargs)
        return _on_full(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    @having(asker, value=Asker.ENGINE)
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the operation
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather the tensor for operations below autograd."""
        if func._schema.is_mutable:
            raise ConfigError(
                f"{func} would write into a tensor of which each rank has a part; expected "
                "reading. For logits, give their layer the style 'colwise_gather_output'; else "
                "turn sequence_parallel off."
            )
        args, kwargs = map_only(DimShardedTensor, _gather_detached, (args, kwargs or {}))
        return func(*args, **kwargs)


def own_part(value: Any) -> Any:
    """Return this rank's part of a `DimShardedTensor`; other values as they are."""
    return value.part.local if isinstance(value, DimShardedTensor) else value


def _copied(wide: DimShardedTensor, memo: dict[int, Any]) -> Any:
    """Return what `copy.deepcopy` makes: of a weight a full parameter; each rank must call."""
    if parameter_behind(wide) is None:
        return Tensor.__deepcopy__(wide, memo)  # type: ignore[no-untyped-call]
    return nn.Parameter(_gather_detached(wide), wide.requires_grad)


def _taken_apart(wide: DimShardedTensor) -> TakenApart:
    part = wide.part
    return part.local, replace(part, local=_nothing_like(part.local)).widen


take_apart_by(DimShardedTensor, _taken_apart)


def showing(seen: Tensor, param: Tensor) -> Tensor:
    """Return what user code sees of a parameter of which this rank has a part, and note which.

    They share attributes: what a step keeps in `param.momentum`, hooks and later steps find.
    """
    if seen is not param and isinstance(seen, DimShardedTensor):
        seen._shown, seen.__dict__ = param, vars(param)
        seen._part = replace(seen._part, weight=param)
    return seen


def parameter_behind(key: object) -> Tensor | None:
    """Return the parameter that a tensor shows to user code; None for another object."""
    return getattr(key, "_shown", None) if isinstance(key, DimShardedTensor) else None


def _gather(sharded: DimShardedTensor) -> Tensor:
    return sharded.part.gather()


def _gather_detached(sharded: DimShardedTensor) -> Tensor:
    return sharded.part.gather_detached()


def _on_full(func: Function, args: Any, kwargs: Kwargs) -> Any:
    """Gather and go on with plain tensors; written values go back into the part."""
    if name_of(func) in MOVES_MEMORY:
        raise memory_refused(func, args[0], "each rank of a layer has a part of it")
    _refuse_aliases(func, args)

    def full(sharded: DimShardedTensor) -> Tensor:
        sharded.part.note_gather(func)
        return _gather(sharded)

    fulls = Exchanged(DimShardedTensor, full)
    full_args, full_kwargs = fulls.given((args, kwargs))
    result = func(*full_args, **full_kwargs)
    targets = [one for one in changed_by(func, args, kwargs) if id(one) in fulls.pairs]
    for target in targets:
        target.take_over(fulls.pairs[id(target)][1])
    if targets:
        return fulls.returned(result)
    # In a graph torch itself refuses to write to views of weights, by which derivatives are taken.
    shown = [
        Gathered(one, full)
        for one, full in fulls.pairs.values()
        if not (full.requires_grad and _is_of_leaf(one.part.local))
    ]
    return _shown(result, shown)


def _refuse_aliases(func: Function, args: Sequence[Any]) -> None:
    """Raise where another tensor, which would be given a copy, is to lie in a weight's memory."""
    if func != SET_DATA or isinstance(args[0], nn.Parameter):
        return
    wide = args[1].of._wide if isinstance(args[1], ViewOfGathered) else args[1]
    local, weight = wide.part.local, wide.part.weight
    if weight is not None and storage_key(local) == storage_key(weight):
        raise ConfigError(
            f"Rank {wide.part.group.rank}: .data of another tensor was set to a weight of shape "
            f"{tuple(wide.shape)} in a step, but each rank of a layer has a part of it; expected "
            f"elements that are the other tensor's own. Set it to weight.detach().clone()."
        )


def _is_of_leaf(local: Tensor) -> bool:
    """Whether a part is of a weight, and not computed from one."""
    return local.is_leaf or (local._base is not None and local._base.is_leaf)


def _with_gradients(func: Function, args: Any, kwargs: Kwargs) -> Any:
    """Compute with averaged gradients, whose elements may lie on ranks beyond those of the parts.

    weight.sub_(0.1 * weight.grad), (weight * weight.grad).sum()     with the full gradient
    weight.grad.add_(weight), weight - 0.1 * weight.grad             where its elements are
    """
    targets, wide = changed_by(func, args, kwargs), found_in(DimShardedTensor, (args, kwargs))
    in_graph = torch.is_grad_enabled() and any(one.requires_grad for one in wide)
    changes_gradient = any(isinstance(one, AveragedGradient) for one in targets)
    if changes_gradient or not (targets or in_graph):
        args, kwargs = map_only(DimShardedTensor, _gather_detached, (args, kwargs))
    else:
        args, kwargs = map_only(AveragedGradient, AveragedGradient.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


class Gathered:
    """The full values of a tensor of which a step has a view."""

    def __init__(self, wide: DimShardedTensor, full: Tensor) -> None:
        self._wide, self.full = wide, full
        self._local_was, self._full_was = _version(wide.part.local), _version(full)

    def look(self, *, writes: bool) -> None:
        """Have the values as they are now before something is written; each rank must write.

        What only reads sends nothing: one rank alone may print a view.
        """
        part, in_graph = self._wide.part, self.full.requires_grad
        if writes and not in_graph:
            self.full.copy_(part.gather_detached())
            self._full_was = _version(self.full)
        elif _version(part.local) != self._local_was:
            raise ConfigError(
                f"Rank {part.group.rank}: a tensor of which each rank has a part was changed in "
                f"place after a view of it was taken, expected the view of what it is now. Take "
                f"the view again."
            )

    def take(self, *, is_written: bool, before: Tensor | None) -> None:
        """Let this rank's part have what was written, if anything was."""
        version = _version(self.full)
        if is_written if version is None else version != self._full_was:
            part, full = self._wide.part, self.full
            if before is not None:
                full = torch.where(full != before, full, part.gather())
            self._wide.take_over(full)
        self._local_was, self._full_was = _version(self._wide.part.local), version

    def has(self, value: Tensor) -> bool:
        """Whether a tensor is a view of these."""
        return (
            type(value) is Tensor
            and value is not self.full
            and value.layout == torch.strided
            and value.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr()
        )


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed; None in inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


class ViewOfGathered(Tensor):
    """A view of a gathered tensor in a step: what is written to it is written to the parts."""

    of: Gathered

    @classmethod
    @untraced
    @having(asker, value=Asker.ENGINE)
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation on plain tensors, as they are now, and take over what it has written."""
        kwargs = dict(kwargs or {})
        if _writes_several(func, args):
            return _in_turn(func, args, kwargs)
        views = found_in(cls, (args, kwargs))
        _refuse_aliases(func, args)
        homes = [*{id(one.of): one.of for one in views}.values()]
        targets = [one for one in changed_by(func, args, kwargs) if isinstance(one, cls)]
        if func in OF_GRAPH and DimShardedTensor in types:
            return DimShardedTensor.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_VIEW or func in OF_GRAPH:
                return func(*args, **kwargs)
            plain = Exchanged(cls, lambda one: one.as_subclass(Tensor))
            given = plain.given((args, kwargs))
        with torch.no_grad():
            for home in homes:
                home.look(writes=bool(targets) or bool(kwargs.get("inplace")))
        before = [home.full.detach().clone() if homes[1:] else None for home in homes]
        result = func(*given[0], **given[1])
        for home, values in zip(homes, before, strict=True):
            home.take(is_written=bool(targets), before=values)
        return plain.returned(result) if targets else _shown(result, homes)


def _writes_several(func: Function, args: Any) -> bool:
    """Whether an operation changes the tensors of a list, of which one may be a view of another."""
    is_of_list = name_of(func).startswith("foreach") and bool(args)
    return is_of_list and writes(func) and len(args[0]) > 1


def _in_turn(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Change each tensor of a list by itself, in their order."""
    for index in range(len(args[0])):

        def own(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, (list, tuple)) else value

        func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})


def _shown(result: Any, homes: Sequence[Gathered]) -> Any:
    """Return a result whose views of gathered weights know of these."""

    def shown(value: Tensor) -> Tensor:
        home = next((one for one in homes if one.has(value)), None)
        if home is None:
            return value
        view = value.as_subclass(ViewOfGathered)
        view.of = home
        return view

    return map_only(Tensor, shown, result) if homes else result


OF_WRAPPER = (OF_FORMAT | OF_SHAPE | {Tensor.__hash__}) - {Tensor.is_contiguous}
"""What the wrapper answers itself; whether it is contiguous is the part's."""
_OF_VIEW = OF_FORMAT | OF_SHAPE | OF_OBJECT | functions("_base untyped_storage")


@dataclass
class _Link:
    """Tells whether a part was changed in place, so that its wrapper's gradient is not its own."""

    is_broken: bool = False


def _nothing_like(local: Tensor) -> Tensor:
    """Return a tensor of the same kind without elements; `local` may be another part's wrapper."""
    return torch.empty(0, dtype=local.dtype, device=local.device)


class _Widen(torch.autograd.Function):
    """Forward: a wrapper of the full shape, without memory. Backward: the own slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: Part, link: _Link) -> Tensor:
        ctx.part, ctx.link = replace(part, local=_nothing_like(local)), link
        wrapper: Tensor = Tensor._make_wrapper_subclass(
            DimShardedTensor, part.full_shape, dtype=local.dtype, device=local.device
        )
        return wrapper

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.link.is_broken:
            raise ConfigError(
                f"Rank {ctx.part.group.rank}: a tensor of which each rank has a part was changed "
                "in place and given to an autograd function, such as a reentrant checkpoint; "
                "expected one or the other. Use x = x + y for x += y, or use_reentrant=False."
            )
        return ctx.part.own_gradient(grads[0]), None, None


class _Narrow(torch.autograd.Function):
    """Forward: the part of an autograd function's result. Backward: all of the parts."""

    @staticmethod
    def forward(ctx: Any, wide: DimShardedTensor) -> Tensor:
        ctx.part = replace(wide._part, local=_nothing_like(wide._part.local))
        return wide._part.local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.part.wide_gradient(grads[0])


class DifferentiatedParts:
    """Gives autograd this rank's parts of the tensors that a backward is told to stop at."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`."""
        return run([own_part(one) for one in inputs])
