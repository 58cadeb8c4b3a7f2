"""A tensor whose elements are spread over ranks: it looks full, and each rank computes its part.

    rank 0  [ a b c ]    abs, mul_, clamp, + ...   on each rank's elements; nothing is sent
    rank 1  [ d e   ]    norm, sum, max, all ...   of a b c d e, the same on every rank
    looks like a b c d e, of the full shape     @, indexing, sort ...      an error with advice

Without it a reduction would silently give another number on every rank. A reduction is a collective
call: each rank that has a part must make it, in the same order. Sums are in float64, so that the
number of ranks and the places of the cuts do not show in the result.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.core.call_site import reading
from lightning_shard.core.tensor_calls import BY_OBJECT, SeesOperations, found_in, map_only
from lightning_shard.data_parallel.model_split import ModelSplit, beyond_shards
from lightning_shard.data_parallel.torch_private import storage_key, storage_uses
from lightning_shard.data_parallel.views.tensor_properties import unrecorded
from lightning_shard.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """The spread of the elements of one parameter, and of its gradient, over ranks.

    Attributes:
        shape: Shape of the full gradient.
        shard_groups: Returns the groups over whose ranks the elements of this rank's part of the
            model lie.
        device: Device of this rank's elements.
        own_shape: Shape of the part that the ranks of `shard_groups` have together; None where
            this rank has no part of the parameter.
        bounds: First and one-past-last of this rank's elements in that part, flattened; None where
            this rank has all of it.
        cuts: The bounds of every rank of `shard_groups`.
        lent: The memory of shards that user code was given.
        refusal: Why results of the ranks cannot be combined, which do not come here together.
        is_of_some: Whether some ranks have no element, as of an expert in a list.
        reduces_full: Whether sums and norms have the bits of the full tensor's, which is gathered,
            and random numbers those that are drawn for it.
    """

    name: str
    shape: torch.Size
    param: nn.Parameter
    split: ModelSplit
    shard_groups: Callable[[], Sequence[Collectives]]
    device: torch.device
    own_shape: torch.Size | None
    bounds: tuple[int, int] | None
    cuts: Sequence[tuple[int, int]] = ()
    lent: "LentMemory"
    refusal: str = ""
    is_of_some: bool = False
    reduces_full: bool = False

    @property
    def places(self) -> Hashable:
        """What is equal, on all ranks or none, for tensors whose elements lie alike."""
        return tuple(self.cuts), self.split.placement(self.param)

    @property
    def groups(self) -> Sequence[Collectives]:
        """Groups over which partial results are combined, one after the other."""
        self.refuse_apart()
        return (*self.shard_groups(), *self.split.groups_of(self.param))

    @property
    def num_elements(self) -> int:
        """Number of this rank's elements, whether a gradient is there or not."""
        if self.own_shape is None:
            return 0
        start, stop = self.bounds or (0, self.own_shape.numel())
        return stop - start

    @property
    def counts(self) -> bool:
        """Whether this rank's elements count, and are not also another rank's."""
        return self.split.counts(self.param)

    @property
    def counts_once(self) -> bool:
        """Whether this rank's elements count in a sum over all ranks that share the model."""
        own = self.split.groups_of(self.param)
        shard = () if self.bounds is None else self.shard_groups()
        beyond = beyond_shards(shard, self.split)
        others = [group for group in beyond if group not in own]
        return self.counts and all(group.rank == 0 for group in others)

    def cut(self, tensor: Tensor, local: Tensor) -> Tensor | None:
        """Return this rank's shard of a tensor that is full, as large as its part, or a shard."""
        if tensor.shape == local.shape and not self._is_ambiguous(local):
            return tensor
        if tensor.shape == self.shape:
            if self.own_shape is None:
                return tensor.new_empty(0)
            tensor = self.split.local(self.param, tensor)
        elif tensor.shape != self.own_shape:
            return None
        return tensor if self.bounds is None else tensor.reshape(-1)[slice(*self.bounds)]

    def own(self, tensor: Tensor) -> Tensor:
        """Return the part of a full tensor that belongs to this rank's part of the model."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.own_shape is None:
                return tensor.new_empty(self.param.shape)
            return self.split.local(self.param, tensor)

    def refuse_apart(self) -> None:
        """Raise where the ranks do not come here together."""
        if self.refusal:
            raise ConfigError(self.refusal)

    def _is_ambiguous(self, local: Tensor) -> bool:
        """Whether a tensor of the shard's shape may be meant as a row for every row."""
        if self.bounds is None or len(self.shape) < 2 or local.numel() != self.shape[-1]:
            return False
        return bool(self.bounds[0] % self.shape[-1])

    @torch.no_grad()
    def join(self, local: Tensor) -> Tensor:
        """Return the full tensor of the ranks' parts; each rank must call."""
        self.refuse_apart()
        local = local.to(self.device)
        own = local.clone()
        if self.own_shape is not None and self.bounds is not None:
            flags = local.dtype == torch.bool
            own = local.new_zeros(
                self.own_shape.numel(), dtype=torch.uint8 if flags else local.dtype
            )
            own[slice(*self.bounds)] = local
            for group in self.shard_groups():
                group.all_reduce(own, "sum").wait()
            own = own.view(self.own_shape).to(local.dtype)
        return self.split.full(self.param, own)


class NotShardedError(ConfigError):
    """An operation cannot be computed from shards; no rank has sent anything for it."""


class ShardedTensor(SeesOperations):
    """Looks like the full tensor of which this rank has `local`.

    Attributes:
        gathers: Whether operations that shards do not suffice for are computed on full copies.
        local: This rank's elements, in whatever shape they lie.
        norm_of_all: Returns the full tensor's norm of an order, together with other tensors'; None
            computes it for this tensor alone.
        on_change: Called when the elements have been changed in place.
    """

    gathers = False
    local: Tensor
    spread: Spread
    norm_of_all: Callable[[float], Tensor] | None
    on_change: Callable[[], object]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spread: Spread,
        shape: Sequence[int] | None = None,
        norm_of_all: Callable[[float], Tensor] | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> "ShardedTensor":
        """Make a tensor that looks full, or of another `shape` of as many elements."""
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(
            cls, spread.shape if shape is None else shape, dtype=local.dtype, device=local.device
        )
        tensor.local, tensor.spread = local, spread
        tensor.norm_of_all, tensor.on_change = norm_of_all, on_change
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(of={self.spread.name!r}, shape={tuple(self.shape)})"

    def full_tensor(self) -> Tensor:
        """Return the full tensor on every rank; each rank must call."""
        with reading(self.spread.name):
            return self.spread.join(self.local).view(self.shape)

    def take_over(self, full: Tensor) -> None:
        """Write this rank's elements of a full tensor, such as a copy that was changed."""
        own = self.spread.cut(full.reshape(self.spread.shape), self.local)
        assert own is not None
        self.local.copy_(own.reshape(self.local.shape))
        self.spread.lent.changed()
        self.on_change()

    def beside(self, local: Tensor) -> "ShardedTensor":
        """Return a tensor of other elements that is spread and looks like this one."""
        return type(self)(local, self.spread, self.shape)

    @classmethod
    @override
    def dispatched(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute element by element, or over the groups."""
        name = func._schema.name.partition("::")[2]
        if name in _REDUCTIONS or name in _DRAWING:
            spread = _first((args, kwargs)).spread
        if name in _DRAWING and spread.reduces_full:
            return _drawn(func, args, kwargs)
        if name in _REDUCTIONS:
            with reading(spread.name):
                if spread.reduces_full:
                    full_args, kwargs = map_only(ShardedTensor, _full, (args, kwargs))
                    return func(*full_args, **kwargs)
                return _REDUCTIONS[name](func, *args, **kwargs)
        if name.startswith("_foreach_"):
            return _each(func, args, kwargs)
        if name in _VIEWS:
            return _viewed(func, *args)
        if torch.Tag.pointwise in func.tags or name in _BY_ELEMENT:
            return _by_element(func, args, kwargs)
        raise refusal(func, _first((args, kwargs)))


@dataclass(eq=False)
class _Lent:
    """Memory that user code was given.

    Attributes:
        shard: This rank's elements, with their spread.
        full: The memory: all elements.
        own: This rank's elements as they lay in the memory when it was last compared.
        is_by_address: Whether user code may know the address, and hold nothing.
        is_stale: Whether the shards have changed since.
    """

    shard: "ShardedTensor"
    full: Tensor
    own: Tensor
    is_by_address: bool
    is_stale: bool = False

    def take_back(self) -> None:
        """Write to the shard what user code has written to the memory."""
        own = self._cut()
        if not torch.equal(own.view(torch.uint8), self.own.view(torch.uint8)):
            self.shard.local.copy_(own.view(self.shard.local.shape))
            self.own = own.clone()
            self.shard.on_change()

    def renew(self, full: Tensor) -> None:
        """Let the memory have the elements as they are now."""
        if full is not self.full:
            self.full.copy_(full)
        self.own, self.is_stale = self._cut().clone(), False

    def _cut(self) -> Tensor:
        own = self.shard.spread.cut(self.full, self.shard.local)
        assert own is not None
        return own.reshape(-1).contiguous()


class LentMemory:
    """The memory of an engine's shards that user code was given and may write to.

    shard.numpy(), .data_ptr(), .untyped_storage() ──> memory of all elements, gathered now
    what is written there                          ──> back into the shards, with the next operation
                                                       or when a unit is unsharded
    the hook or step ends                          ──> the memory goes, unless user code holds it

    A shard has no memory of its own shape: files and arrays of it were garbage.
    """

    def __init__(self) -> None:
        self._lent: dict[tuple[int, int, int], _Lent] = {}

    @torch.no_grad()
    def of(self, shard: ShardedTensor, function: str) -> Tensor:
        """Return all elements in memory that stays as long as user code uses it; collective.

        What is known by its address is there for the next one to ask, so that rank 0 alone may
        write a file of tensors whose storages all ranks have compared, as Hugging Face's does.
        """
        known = self._lent.get(_key(shard))
        if known is not None and known.is_by_address and not known.is_stale:
            return known.full.view(shard.shape)
        full = shard.full_tensor().view(shard.spread.shape).contiguous()
        for key, lent in list(self._lent.items()):
            if not lent.is_by_address and storage_uses(lent.full) == 1:
                lent.take_back()
                del self._lent[key]
        fresh = _Lent(shard, full, full, is_by_address=False)
        lent = self._lent.setdefault(_key(shard), fresh)
        lent.renew(full)
        lent.is_by_address |= function not in BY_OBJECT
        return lent.full.view(shard.shape)

    @unrecorded
    def take_back(self, shard: ShardedTensor) -> None:
        """Write to a shard what user code has written to memory of its elements."""
        lent = self._lent.get(_key(shard)) if self._lent else None
        if lent is not None:
            lent.take_back()

    @torch.no_grad()
    def take_all_back(self) -> None:
        """Write to all shards what user code has written."""
        for lent in self._lent.values():
            lent.take_back()

    def changed(self) -> None:
        """Take note that shards have changed, on all ranks alike."""
        for lent in self._lent.values():
            lent.is_stale = True

    @torch.no_grad()
    def end(self) -> None:
        """Write to all shards what user code has written, and let the memory go."""
        lent, self._lent = self._lent, {}
        for one in lent.values():
            one.take_back()


def _key(shard: ShardedTensor) -> tuple[int, int, int]:
    return id(shard.spread), storage_key(shard.local), int(shard.local.storage_offset())


_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
_NAMES = (
    "alias clone copy_ detach _to_copy lift_fresh fill fill_ zero_ masked_fill masked_fill_ "
    "floor_divide floor_divide_ empty_like full_like ones_like zeros_like"
)
_DRAWN = "bernoulli bernoulli_ exponential_ log_normal_ normal_ uniform_ rand_like randn_like"
_DRAWING = frozenset(_DRAWN.split())
_BY_ELEMENT = frozenset(_NAMES.split()) | _DRAWING  # which torch does not tag as such


def refusal(func: Any, tensor: ShardedTensor, reason: str = "") -> ConfigError:
    """Return the error for an operation that cannot be computed from shards, with advice."""
    return NotShardedError(
        f"The gradient of {tensor.spread.name!r} lies in parts on the ranks, so {func} cannot be "
        f"computed from .grad here{reason and ' (' + reason + ')'}. Expected what goes element by "
        f"element, or what makes one number of all (norm, sum, mean, max ...), which every rank "
        f"then gets. Take all of it with .grad.full_tensor() on every rank, clip with "
        f"Trainer(gradient_clip_val=...) or self.clip_gradients(...), or use strategy='shard_ddp', "
        f"which keeps full gradients."
    )


def _first(given: Any) -> ShardedTensor:
    return max(_sharded(given), key=lambda one: one.gathers)  # the first of those


def _full(tensor: ShardedTensor) -> Tensor:
    return tensor.full_tensor()


def _sharded(given: Any) -> list[ShardedTensor]:
    return found_in(ShardedTensor, given)


def _viewed(func: Any, tensor: ShardedTensor, shape: Sequence[int], *_: Any) -> ShardedTensor:
    """Return the tensor in its shape or flat: elements stay in their order."""
    if isinstance(shape, torch.dtype):
        raise refusal(func, tensor, f"as {shape}, expected its own format")
    wanted = [tensor.numel() if size == -1 and len(shape) == 1 else size for size in shape]
    if wanted not in ([tensor.numel()], list(tensor.shape)):
        raise refusal(func, tensor, f"to shape {tuple(shape)}, expected it flat or as it is")
    return type(tensor)(tensor.local, tensor.spread, wanted, tensor.norm_of_all, tensor.on_change)


def _by_element(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on this rank's elements."""
    target = kwargs.get("out", args[0] if func._schema.is_mutable else None)
    like = target if isinstance(target, ShardedTensor) else _first((args, kwargs))

    def part(tensor: Tensor) -> Tensor:
        return part_of(func, tensor, like, is_written=tensor is target)

    local_args, local_kwargs = map_only(Tensor, part, (tuple(args), kwargs))
    result = func(*local_args, **local_kwargs)
    if target is not None:
        if isinstance(target, ShardedTensor):
            target.on_change()
        return target

    def wrapped(tensor: Tensor) -> Tensor:
        if tensor.shape != like.local.shape:
            raise refusal(func, like, f"it gives another shape, {tuple(tensor.shape)}")
        return like.beside(tensor)

    if func._schema.name in ("aten::detach", "aten::alias"):
        return _viewed(func, like, like.shape)
    return map_only(Tensor, wrapped, result)


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw for the full tensor, as each rank does alike, and keep this rank's elements."""
    like = _first((args, kwargs))
    full_args, kwargs = map_only(ShardedTensor, _full, (args, kwargs))
    drawn = like if func._schema.is_mutable else like.beside(torch.empty_like(like.local))
    drawn.take_over(func(*full_args, **kwargs))
    return drawn


def _each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute on the elements of every tensor of a list, beside those of other lists."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and _has_tensors(arg)]
    likes = [next(iter(_sharded(row)), None) for row in zip(*lists, strict=True)]
    first = _first(args)

    def parts(arg: Any) -> Any:
        if not (isinstance(arg, (list, tuple)) and _has_tensors(arg)):
            return arg
        written = func._schema.is_mutable and arg is args[0]
        return [
            one if like is None else part_of(func, one, like, is_written=written)
            for one, like in zip(arg, likes, strict=True)
        ]

    result = func(*map(parts, args), **kwargs)
    if func._schema.is_mutable:
        for tensor in _sharded(list(args[0])):
            tensor.on_change()
        return None
    if not isinstance(result, (list, tuple)) or len(result) != len(likes):
        raise refusal(func, first)
    pairs = zip(result, likes, strict=True)
    return [one if like is None else like.beside(one) for one, like in pairs]


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def part_of(func: Any, tensor: Tensor, like: ShardedTensor, *, is_written: bool = False) -> Tensor:
    """Return the elements of a tensor that belong to this rank's elements of `like`."""
    if isinstance(tensor, ShardedTensor):
        if not is_alike(tensor, like):
            raise refusal(func, like, f"together with that of {tensor.spread.name!r}")
        return tensor.local if is_written else tensor.local.to(like.local.device)
    if tensor.numel() == 1 and not is_written:
        scalar = tensor.reshape((1,) * min(tensor.ndim, like.local.ndim))
        return scalar.to(like.local.device)
    if like.gathers and not is_written:
        tensor = _broadcast(tensor, like)
    if tensor.shape == like.shape and not is_written and tensor.shape != like.local.shape:
        tensor = tensor.reshape(like.spread.shape)
    part = like.spread.cut(tensor, like.local)
    if like.gathers and is_written and tensor.shape == like.shape:
        part = None  # full, though on this rank the part is perhaps as large
    if part is None or (is_written and part is not tensor):
        written = "written to " if is_written else ""
        raise refusal(
            func,
            like,
            f"together with a tensor of shape {tuple(tensor.shape)} that is {written}no shard of "
            f"it; torch.zeros_like(param.grad) makes one",
        )
    return part if is_written else part.to(like.local.device)  # offload: averages on the host


def _broadcast(tensor: Tensor, like: ShardedTensor) -> Tensor:
    """Return a tensor expanded to the full shape of `like`, if it is not a shard of that shape."""
    if tensor.shape == like.local.shape and tensor.shape != like.shape:
        if like.spread.cut(tensor, like.local) is None:
            raise ConfigError(
                f"A tensor of shape {tuple(tensor.shape)} meets {like.spread.name!r} of shape "
                f"{tuple(like.shape)}, of which this rank has as many elements; expected one that "
                f"cannot be taken for them. Expand it to the parameter's shape."
            )
        return tensor
    sizes = zip(reversed(tensor.shape), reversed(like.shape), strict=False)
    fits = tensor.ndim <= like.ndim and all(own in (1, size) for own, size in sizes)
    return tensor.expand(like.shape) if fits else tensor


def is_alike(tensor: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether the elements of two tensors lie on the same ranks, in the same order."""
    if tensor.shape != other.shape:
        return False
    gathers = tensor.gathers or other.gathers
    return tensor.spread is other.spread or (
        gathers and tensor.spread.places == other.spread.places
    )


_Dims = Sequence[int] | int | None
_INFINITY = float("inf")


def combined(tensor: ShardedTensor, partial: Tensor, op: ReduceOpName = "sum") -> Tensor:
    """Combine this rank's partial result with those of the other ranks that have elements."""
    total = partial.to(tensor.spread.device)
    for group in tensor.spread.groups:
        group.all_reduce(total, op).wait()
    return total.to(tensor.device)


def _counted(tensor: ShardedTensor) -> Tensor:
    """Return this rank's elements, none where they are another rank's too; shape (n,)."""
    flat = tensor.local.reshape(-1)
    return flat if tensor.spread.counts else flat[:0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _check_dims(func: Any, tensor: ShardedTensor, dim: _Dims) -> None:
    """Refuse a reduction that keeps some of several dimensions."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    kept = set(range(tensor.ndim)) - {one % max(tensor.ndim, 1) for one in dims}
    if dims and kept:
        raise refusal(func, tensor, f"along dimension {dim} only")


def _shaped(tensor: ShardedTensor, value: Tensor, keepdim: bool) -> Tensor:
    return value.reshape((1,) * tensor.ndim if keepdim else ())


def _sum(
    func: Any,
    tensor: ShardedTensor,
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check_dims(func, tensor, dim)
    total = _total(tensor, _counted(tensor))
    kind = tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else None
    return _shaped(tensor, total, keepdim).to(dtype or kind or torch.int64)


def _total(tensor: ShardedTensor, elements: Tensor) -> Tensor:
    return combined(tensor, elements.sum(dtype=_wide(elements.dtype)))


def _nansum(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return _sum(func, tensor.beside(tensor.local.nan_to_num(0.0, _INFINITY, -_INFINITY)), *args)


def _mean(
    func: Any, tensor: ShardedTensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    total = _sum(func, tensor, *args, dtype=_wide(tensor.dtype), **kwargs)
    return (total / tensor.numel()).to(dtype or tensor.dtype)


def _largest(tensor: ShardedTensor, sign: int) -> Tensor:
    """Return the largest element times `sign`; NaN where any element is NaN."""
    elements = _counted(tensor)
    if not elements.dtype.is_floating_point:
        lowest = torch.iinfo(torch.int64).min
        own = (elements.to(torch.int64) * sign).max() if elements.numel() else None
        partial = torch.tensor(lowest) if own is None else own
        return combined(tensor, partial, "max") * sign
    wide = elements.double() * sign
    known = wide[~wide.isnan()]  # what a maximum makes of the others depends on the backend
    top = known.max() if known.numel() else wide.new_tensor(-_INFINITY)
    both = combined(tensor, torch.stack([top, wide.isnan().any().double()]), "max")
    return torch.where(both[1] > 0, torch.nan, both[0]) * sign


def _extreme(sign: int) -> Callable[..., Tensor]:
    def extreme(
        func: Any, tensor: ShardedTensor, dim: _Dims = None, keepdim: bool = False
    ) -> Tensor:
        if isinstance(dim, (ShardedTensor, Tensor)):
            raise refusal(func, tensor)
        _check_dims(func, tensor, dim)
        if func._schema.name in ("aten::max", "aten::min") and dim is not None:
            raise refusal(func, tensor, "with indices")
        return _shaped(tensor, _largest(tensor, sign), keepdim).to(tensor.dtype)

    return extreme


def _aminmax(
    func: Any, tensor: ShardedTensor, *, dim: _Dims = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return (
        _extreme(-1)(func, tensor, [] if dim is None else [dim], keepdim),
        _extreme(1)(func, tensor, [] if dim is None else [dim], keepdim),
    )


def _truth(op: ReduceOpName) -> Callable[..., Tensor]:
    def truth(func: Any, tensor: ShardedTensor, dim: _Dims = None, keepdim: bool = False) -> Tensor:
        _check_dims(func, tensor, dim)
        found = _counted(tensor) != 0
        own = found.all() if op == "min" else found.any()
        return _shaped(tensor, combined(tensor, own.to(torch.uint8), op), keepdim).bool()

    return truth


def _count_nonzero(func: Any, tensor: ShardedTensor, dim: _Dims = None) -> Tensor:
    _check_dims(func, tensor, dim)
    return combined(tensor, (_counted(tensor) != 0).sum())


def partial_norm(elements: Tensor, order: float) -> Tensor:
    """Return this rank's contribution to a norm, in float64, for `combine_norms`."""
    if not elements.numel():
        return torch.tensor(_INFINITY if order == -_INFINITY else 0.0, dtype=torch.float64)
    narrow = elements.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(elements, order, dtype=torch.float32 if narrow else None)
    wide: Tensor = norm.to(torch.float64)
    return wide if abs(order) == _INFINITY or order == 0 else wide.pow(order)


def combine_norms(
    partial: Tensor, order: float, reduce: Callable[[Tensor, ReduceOpName], Tensor]
) -> Tensor:
    """Return the norms over all ranks, one per element of the ranks' `partial_norm` results."""
    if abs(order) != _INFINITY:
        total = reduce(partial, "sum")
        return total if order == 0 else total ** (1.0 / order)
    sign = 1.0 if order > 0 else -1.0
    unknown = partial.isnan()  # what a maximum makes of it depends on the backend
    both = torch.stack([(partial * sign).masked_fill(unknown, -_INFINITY), unknown.double()])
    largest, is_unknown = reduce(both, "max").unbind()
    return (largest * sign).masked_fill(is_unknown > 0, torch.nan)


def _vector_norm(
    func: Any,
    tensor: ShardedTensor,
    ord: float = 2,  # noqa: A002 - torch's name
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check_dims(func, tensor, dim)
    return _shaped(tensor, _norm_of(tensor, float(ord)), keepdim).to(dtype or _real(tensor.dtype))


def _norm(
    func: Any, tensor: ShardedTensor, p: float | None = 2, *args: Any, **kwargs: Any
) -> Tensor:
    return _vector_norm(func, tensor, 2 if p is None else p, *args, **kwargs)


def _norm_of(tensor: ShardedTensor, order: float) -> Tensor:
    """Return the norm over all ranks, in float64."""
    if tensor.norm_of_all is not None:
        return tensor.norm_of_all(order)
    return combine_norms(
        partial_norm(_counted(tensor), order), order, lambda own, op: combined(tensor, own, op)
    )


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _foreach_norm(
    func: Any,
    tensors: Sequence[Tensor],
    ord: float = 2,  # noqa: A002 - torch's name
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [torch.linalg.vector_norm(one, ord, dtype=dtype) for one in tensors]


def _var_mean(
    func: Any,
    tensor: ShardedTensor,
    dim: _Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_dims(func, tensor, dim)
    elements = _counted(tensor)
    mean = _total(tensor, elements) / tensor.numel()
    squares = _total(tensor, (elements.to(mean.dtype) - mean).abs().square())
    count = tensor.numel() - (1 if correction is None else correction)
    var = squares / max(count, 0)
    kind = _real(tensor.dtype)
    return (
        _shaped(tensor, var, keepdim).to(kind),
        _shaped(tensor, mean, keepdim).to(tensor.dtype),
    )


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(*args, **kwargs)
    return var.sqrt(), mean


def _item(func: Any, tensor: ShardedTensor) -> Any:
    """Return the element of a tensor that has one element."""
    if tensor.numel() != 1:
        raise refusal(func, tensor)
    return _total(tensor, _counted(tensor)).to(tensor.dtype).item()


def _equal(func: Any, tensor: ShardedTensor, other: Tensor) -> bool:
    if not isinstance(tensor, ShardedTensor):
        tensor, other = other, tensor
    return bool((tensor == other).all())


def _dot(func: Any, tensor: ShardedTensor, other: ShardedTensor) -> Tensor:
    both = isinstance(tensor, ShardedTensor) and isinstance(other, ShardedTensor)
    if not (both and is_alike(tensor, other)):
        raise refusal(func, tensor if isinstance(tensor, ShardedTensor) else other)
    result: Tensor = (tensor * other).sum()
    return result


def _histc(
    func: Any,
    tensor: ShardedTensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's name
    max: float = 0,  # noqa: A002
) -> Tensor:
    if min == max:
        min, max = _largest(tensor, -1).item(), _largest(tensor, 1).item()  # noqa: A001
    if min == max:
        min, max = min - 1, max + 1  # noqa: A001 - as torch does
    own = torch.histc(_counted(tensor), bins, min, max).double()
    return combined(tensor, own).to(tensor.dtype)


_REDUCTIONS: dict[str, Callable[..., Any]] = {  # by name, whatever the overload
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "all": _truth("min"),
    "amax": _extreme(1),
    "amin": _extreme(-1),
    "aminmax": _aminmax,
    "any": _truth("max"),
    "count_nonzero": _count_nonzero,
    "dot": _dot,
    "equal": _equal,
    "histc": _histc,
    "linalg_vector_norm": _vector_norm,
    "max": _extreme(1),
    "mean": _mean,
    "min": _extreme(-1),
    "nansum": _nansum,
    "norm": _norm,
    "std": lambda *args, **kwargs: _std_mean(*args, **kwargs)[0],
    "std_mean": _std_mean,
    "sum": _sum,
    "var": lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    "var_mean": _var_mean,
}
