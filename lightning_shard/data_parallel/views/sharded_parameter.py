"""A parameter that is in shards now: to user code it looks full, to the engine it is its shard.

    unit.reshard()       param.__class__ = ShardedParameter    param.data: this rank's elements
    hooks, steps         p.norm(), p[0].zero_() ...            computed as with a `ParameterShard`
    unit.ensure_full()   param.__class__ = nn.Parameter        param.data: the full tensor
                         ... or `KeptParameter`                full, or a part: see there

Blocks, compiled code and the optimizer's step meet plain parameters only, which cost nothing. While
the class is changed, a call comes from the engine or Lightning unless `UserCode` says that a hook
or step of the user's runs, and `asker` that it asks; the engine's own functions see parameters
`as_they_are` even then.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import EllipsisType, FunctionType
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_shard.core.call_site import reading
from lightning_shard.core.states import Asker, asker, user_asks
from lightning_shard.core.tensor_calls import (
    GET_DATA,
    OF_FORMAT,
    OF_OBJECT,
    OF_SHAPE,
    OF_TRAINING,
    SET_DATA,
    SET_GRAD,
    Args,
    Exchanged,
    Function,
    Kwargs,
    changed_by,
    found_in,
    functions,
    map_only,
    name_of,
    writes,
)
from lightning_shard.data_parallel.graph_borders import gradient_edge
from lightning_shard.data_parallel.phases import UserCode, ValueSource
from lightning_shard.data_parallel.torch_private import (
    TELLS_OF_ARRIVAL,
    gradient_hooks,
    hooks_after_gradient,
    is_traced,
    outside_transforms,
    queue_after_backward,
    storage_key,
)
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient, GradientNote
from lightning_shard.data_parallel.views.parameter_shard import (
    NEEDS_FULL,
    ParameterShard,
    ShardView,
    computed,
    pickling_refused,
)
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor, Spread, is_alike
from lightning_shard.data_parallel.views.transforms import refuse_recording
from lightning_shard.errors import ConfigError

_KEPT = "_lightning_shard_kept"  # set on those that modules keep beside their own
_HOME = "_lightning_shard_home"  # set on parameters that can be in shards
_LEAVES = "_lightning_shard_leaves"  # set on those that hooks compute with: what stands for them
_BRING = "_lightning_shard_bring"  # set on those of which this rank has no shard, but others
_P = ParamSpec("_P")
_R = TypeVar("_R")
_TENSOR: Any = Tensor  # whose properties are descriptors, which type checkers do not know


shards_as_they_are = torch._C.DisableTorchFunctionSubclass
"""Inside, the engine sees this rank's shards of parameters, whoever calls it."""


def as_they_are(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function run inside of `shards_as_they_are`."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with shards_as_they_are():
            return function(*args, **kwargs)

    return called


@dataclass(frozen=True, eq=False)
class ParameterHome:
    """The part of the engine that a sharded parameter knows.

    Attributes:
        note: Note of its gradient's stand-ins; None for a copy, which has no gradient.
        bring: Makes the parameter full until the step ends, for autograd; returns False outside of
            a step. Each rank must call.
        named: The parameters of the model that this rank has, by name.
        is_rounded: Returns whether the full parameter is here, but rounded for blocks.
        copy: Makes another copy of a parameter that is a copy itself; None for the model's own.
    """

    spread: Spread
    note: GradientNote | None
    user_code: UserCode
    bring: Callable[[], bool]
    named: Mapping[str, nn.Parameter]
    is_rounded: Callable[[], bool] = lambda: False
    copy: Callable[[nn.Parameter], nn.Parameter] | None = None

    def bring_for_user(self) -> bool:
        """Call `bring`, where user code reads the parameter."""
        with reading(self.spread.name), outside_transforms():
            return self.bring()


def settle_in(param: nn.Parameter, home: ParameterHome) -> bool:
    """Give a parameter its home; return False for one of another class, which stays as it is."""
    if type(param) is nn.Parameter:
        vars(param)[_HOME] = home
    return type(param) is nn.Parameter


def settle_beside(param: nn.Parameter, bring: Callable[[], bool]) -> None:
    """Let `bring_full` of a parameter that only other ranks have call `bring`, as theirs does."""
    vars(param)[_BRING] = param, bring


def copy_home(
    param: nn.Parameter, made: nn.Parameter, copy: Callable[[nn.Parameter], nn.Parameter]
) -> None:
    """Give a copy of a shard the home of the parameter that it was copied from."""
    home: ParameterHome | None = vars(param).get(_HOME)
    if home is not None:
        vars(made)[_HOME] = replace(home, note=None, bring=lambda: False, copy=copy)
        present([made], sharded=True)


def move_out(param: nn.Parameter) -> None:
    """End `settle_in` and `settle_beside`: let the parameter show itself as it is."""
    present([param], sharded=False)
    vars(param).pop(_HOME, None)
    vars(param).pop(_BRING, None)
    vars(param).pop(_LEAVES, None)


class KeptParameter(nn.Parameter):
    """A parameter that user code has kept, in a list say: it computes as its module's does.

    In steps of tensor and pipeline parallel the parameter itself is a part, or has no elements.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with what modules have in the parameter's place."""
        given = args, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func not in OF_TRAINING and user_asks():
                given = _as_seen(given)
            first = next(iter(given[0]), None)  # mostly it is this one, and spares a walk
            if type(first) is cls or found_in(cls, given):
                if AveragedGradient not in types:
                    return func(*given[0], **given[1])
                if set(types) - {cls, nn.Parameter, AveragedGradient}:
                    return NotImplemented
                return AveragedGradient.called(func, [AveragedGradient], given[0], dict(given[1]))
        return func(*given[0], **given[1])


def _seen(param: nn.Parameter) -> Tensor:
    stand_in, look = vars(param).get(_KEPT, (None, None))
    seen: Tensor = param if stand_in is None else stand_in
    return seen if look is None else look(seen)


def _as_seen(given: Any) -> Any:
    # To see one may bring its unit: others are no longer of the class that was asked.
    return map_only((KeptParameter, ShardedParameter), _seen, given)


def show_kept(
    param: nn.Parameter,
    stand_in: Tensor | EllipsisType | None = ...,
    look: Callable[[Tensor], Tensor] | EllipsisType | None = ...,
) -> None:
    """Let a parameter that user code has kept compute as what modules show in its place.

    They have `stand_in` there, or the parameter itself, of which `look` makes what user code sees.
    """
    if type(param) not in _CLASSES:
        return
    before = vars(param).pop(_KEPT, (None, None))
    after = (before[0] if stand_in is ... else stand_in, before[1] if look is ... else look)
    if after[0] is not None or after[1] is not None:  # `!=` would compare elements
        vars(param)[_KEPT] = after
    present([param], sharded=type(param) is ShardedParameter)


def present(params: Iterable[nn.Parameter], *, sharded: bool) -> None:
    """Let user code see full parameters where there are shards, or plain ones."""
    for param in params:
        if type(param) in _CLASSES:
            full: Any = KeptParameter if _KEPT in vars(param) else nn.Parameter
            param.__class__ = ShardedParameter if sharded else full


def bring_full(param: Tensor) -> bool:
    """Make a parameter full until the step ends; each rank must call.

    Returns False for shards outside of a step. Ranks that have nothing of the parameter take part
    for what else is in its unit.
    """
    if type(param) is ShardedParameter:
        return _home_of(param).bring_for_user()
    own, bring = vars(param).get(_BRING, (None, None))
    return own is not param or bring()  # else a stand-in, which has its parameter's attributes


def looks_full(param: nn.Parameter) -> bool:
    """Whether who asks finds a full parameter in shards."""
    is_sharded = type(param) is ShardedParameter
    return is_sharded and user_asks() and _home_of(param).user_code.runs


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank has some elements, made by changing a parameter's class."""

    @property
    def grad(self) -> Tensor | None:  # quicker than `__torch_function__`
        """The gradient as it stands on this rank."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = _TENSOR.grad.__get__(self)
            return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _TENSOR.grad.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy a copy; the parameters of the model have what copies them as an attribute."""
        copy = _home_of(self).copy
        if copy is None:
            return nn.Parameter(self.full_tensor(), self.requires_grad)
        return copy(self)

    def full_tensor(self) -> Tensor:
        """Return the full parameter; each rank must call."""
        return _shard_of(self).full_tensor()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spread = _home_of(self).spread
        return f"ShardedParameter(name={spread.name!r}, shape={tuple(spread.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Compute what user code asks of the full parameter."""
        if func is torch.autograd.grad:
            return _differentiated(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.backward:
                _refuse_leaves(found_in(ShardedParameter, (args, kwargs or {})))
            if func in _AS_IT_IS:
                return func(*args, **(kwargs or {}))
            given = tuple(args), dict(kwargs or {})
            if is_traced():
                return func(*given[0], **given[1])
            params = found_in(ShardedParameter, given)
            meets_shards = any(issubclass(one, _SHARDS) for one in types)
            home = _home_of(params[0])
            if asker.get() is Asker.LAYER and home.spread.own_shape is None:
                home.spread.refuse_apart()
            if not (user_asks() and (meets_shards or home.user_code.runs)):
                return func(*given[0], **given[1])
            if any(_KEPT in vars(param) for param in params):
                given = _as_seen(given)
                params = found_in(ShardedParameter, given)
            if params:
                return _of_user(func, params, *given)
        return func(*given[0], **given[1])


_CLASSES: tuple[type[nn.Parameter], ...] = (nn.Parameter, KeptParameter, ShardedParameter)
_SHARDS = (ParameterShard, AveragedGradient, ShardView)
_AS_IT_IS = OF_OBJECT | OF_FORMAT | {Tensor.backward, torch.autograd.backward}
_OF_SHAPE = OF_SHAPE | {torch.zeros_like, torch.ones_like, torch.empty_like}
_NOT_RECORDED = _OF_SHAPE | functions("data data= grad= detach")


def _home_of(param: nn.Parameter) -> ParameterHome:
    home: ParameterHome = vars(param)[_HOME]
    return home


def _shard_of(param: nn.Parameter) -> ParameterShard:
    with torch._C.DisableTorchFunctionSubclass(), outside_transforms():
        spread, value = _home_of(param).spread, param.data
        local = spread.cut(value, value.new_empty(0))
        if local is not None and local.shape != value.shape:  # of `param.set_(full)`, unseen
            spread.lent.changed()
            param.data = value = local.detach().clone()
        return ParameterShard(value, spread)


def _of_user(func: Function, params: Sequence[ShardedParameter], args: Args, kwargs: Kwargs) -> Any:
    """Compute with full parameters, of which rounded ones that are here are brought unrounded."""
    rounded = [one for one in params if func not in _OF_SHAPE and _home_of(one).is_rounded()]
    if rounded and all(_home_of(param).bring_for_user() for param in rounded):
        return computed(func, args, kwargs)
    return _in_shards(func, params, args, kwargs)


def _in_shards(
    func: Function, params: Sequence[ShardedParameter], args: Args, kwargs: Kwargs
) -> Any:
    """Compute with the full parameters of which the arguments are shards."""
    refuse_recording()
    if func == SET_DATA and type(args[0]) is ShardedParameter:
        return _assign(args[0], args[1])
    if func == torch.ops.aten.set_.source_Tensor and type(args[0]) is ShardedParameter:
        _assign(args[0], *args[1:])
        return args[0]
    if func == SET_GRAD:
        return _set_gradient(args[0], args[1])
    if (name := name_of(func)) in NEEDS_FULL:
        raise pickling_refused(_home_of(params[0]).spread.name, name)
    is_of_gradient = any(
        isinstance(one, AveragedGradient) for one in changed_by(func, args, kwargs)
    )
    recorded = is_recorded(func) and not is_of_gradient
    trained = [param for param in params if recorded and param.requires_grad]
    if trained and all(_home_of(param).bring_for_user() for param in trained):
        return computed(func, args, kwargs)  # they are full now; what else is in shards comes too
    is_in_place = writes(func) and not isinstance(func, FunctionType)  # nn.init's see to it
    if trained and is_in_place and args and type(args[0]) is ShardedParameter:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    shards = Exchanged(ShardedParameter, _leaf_of if trained and not writes(func) else _shard_of)
    return shards.returned(computed(func, *shards.given((args, kwargs))))


def _leaf_of(param: nn.Parameter) -> ParameterShard:
    """Return what a hook computes with, of whose graph the parameter gets the gradient."""
    shard = _shard_of(param)
    if param.requires_grad and _home_of(param).note is not None:
        stand_for(shard, param, partial(_put_gradient, param))
        alive = [leaf for leaf in vars(param).get(_LEAVES, ()) if leaf() is not None]
        vars(param)[_LEAVES] = [*alive, ref(shard)]
    return shard


def _put_gradient(param: nn.Parameter, grad: Tensor) -> None:
    if type(param) is ShardedParameter:
        _give_gradient(param, grad.shaped_as(param) if isinstance(grad, AveragedGradient) else grad)
    else:
        param.grad = grad


def stand_for(leaf: Tensor, param: nn.Parameter, put: Callable[[Tensor], None]) -> None:
    """Let a tensor be a leaf that stands for a parameter in a graph that a hook begins.

    In a hook autograd cannot go to a parameter of which this rank has a part. What comes to the
    leaf is added to the parameter's gradient by `put`, as what a hook sets by hand: once the
    backward has ended, since others may be on their way until then.
    """

    def take() -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            _add_gradient(param, grad, put)

    def arrived(_: Tensor) -> None:
        queue_after_backward(lambda: queue_after_backward(take))  # after the engine's own

    with outside_transforms():
        leaf.requires_grad_()
    leaf.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _add_gradient(param: nn.Parameter, grad: Tensor, put: Callable[[Tensor], None]) -> None:
    """Add a rank's own gradient of a full parameter, and call what waits for it."""
    for hook in gradient_hooks(param).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    before = param.grad
    if isinstance(before, AveragedGradient):
        put(AveragedGradient.called(torch.add, [AveragedGradient], (before, grad), {}))
    else:
        put(grad if before is None else before + grad)
    for waiting in hooks_after_gradient(param):
        if not hasattr(waiting, TELLS_OF_ARRIVAL):
            waiting(param)


def _refuse_leaves(params: Iterable[nn.Parameter]) -> None:
    """Raise where a graph may have begun at others than the parameters that it is asked for."""
    for param in params:
        if any(leaf() is not None for leaf in vars(param).get(_LEAVES, ())):
            raise differentiation_refused(_home_of(param).spread.name)


def is_recorded(func: Function) -> bool:
    """Whether autograd is to record an operation on what requires a gradient."""
    return torch.is_grad_enabled() and func not in _NOT_RECORDED


def differentiation_refused(name: str) -> ConfigError:
    """Return the error for `torch.autograd.grad` of a parameter that has no graph in a hook."""
    return ConfigError(
        f"torch.autograd.grad or backward(inputs=...) was asked in a hook for the gradient of "
        f"{name!r}, of which ranks have parts, without a graph to the full parameter; expected it "
        f"in a step. Call it in training_step, and keep there what the hook needs."
    )


def _differentiated(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad`: what it computes again, as a checkpoint does, sees subclasses."""
    sharded = found_in(ShardedParameter, inputs)
    if any(_KEPT in vars(param) for param in sharded) and user_asks():
        with torch._C.DisableTorchFunctionSubclass():
            inputs = _as_seen(inputs)
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        for param in sharded:
            home = _home_of(param)
            in_code = home.user_code.runs and not home.user_code.is_in_backward
            if user_asks() and in_code and param.requires_grad:
                if not home.bring_for_user():
                    _refuse_leaves([param])
                is_part = home.spread.own_shape not in (None, home.spread.shape)
                if is_part or not any(one.requires_grad for one in found_in(Tensor, outputs)):
                    raise differentiation_refused(home.spread.name)
        left = [param for param in sharded if type(param) is ShardedParameter]
        if kwargs.get("materialize_grads") and left:
            return torch.autograd.grad(outputs, inputs, *args, **kwargs)
        edges = {param: gradient_edge(param) for param in left if param.requires_grad}
    given = map_only(ShardedParameter, lambda param: edges.get(param, param), inputs)
    if len(edges) < len(left):  # torch says that these do not require a gradient
        given = map_only(ShardedParameter, GET_DATA, given)
    return torch.autograd.grad(outputs, given, *args, **kwargs)


def _assign(param: nn.Parameter, value: Tensor) -> None:
    """Point a parameter at its shard of an assigned value, which the engine adopts later."""
    shard = _shard_of(param)
    shard.spread.lent.changed()
    _note_source(param, value)
    if isinstance(value, AveragedGradient):
        value = value.sharded()
    if isinstance(value, ShardView):
        value = value.full_tensor()
    if isinstance(value, ShardedTensor):
        local = value.local if is_alike(shard, value) else _cut(shard, value.full_tensor())
    elif value.shape == shard.shape:
        local = _cut(shard, value)
    else:
        local = value
    with torch.no_grad():
        param.data = local.detach()


@as_they_are
def take_set(copy: nn.Parameter, shard: Tensor) -> None:
    """Point a copy at its shard, like `shard`, of what `copy.set_(full)` gave it, unseen."""
    home: ParameterHome | None = vars(copy).get(_HOME)
    if home is not None and copy.shape != shard.shape:
        copy.data = _cut(ParameterShard(shard, home.spread), copy.data).clone()


def _note_source(param: nn.Parameter, value: Tensor) -> None:
    """Note whose memory a parameter is given, alike on ranks that have no element of it."""
    named, sources = _home_of(param).named, _home_of(param).user_code.sources
    for one, source in sources.items():
        if source is not None and source.param is param:  # which shows other memory from now on
            sources[one] = None
    sources[param] = None
    base = value.base if isinstance(value, ShardView) else value
    other = named.get(base.spread.name) if isinstance(base, ParameterShard) else None
    if other is None or other in sources or not isinstance(base, ParameterShard):
        return
    if storage_key(base.local) == storage_key(GET_DATA(other)):
        places = torch.arange(base.numel()).view(base.shape)
        view = value.taken_from(places) if isinstance(value, ShardView) else places
        sources[param] = ValueSource(other, view.flatten())


def _cut(shard: ParameterShard, full: Tensor) -> Tensor:
    local = shard.spread.cut(full, shard.local)
    return full if local is None else local


def _set_gradient(param: nn.Parameter, value: Tensor | None) -> None:
    """Set `.grad` to a result of user code, which the engine adopts later."""
    home: ParameterHome = param.__dict__[_HOME]
    if isinstance(value, AveragedGradient):
        value = value.shaped_as(param)
    user_code = home.user_code
    if value is None or user_code.is_in_backward or not user_code.runs:
        if value is not None and value.shape != param.shape:
            raise ConfigError(
                f".grad of {home.spread.name!r} was set to a tensor of shape {tuple(value.shape)} "
                f"in the middle of a backward, where this rank has a shard of the parameter, of "
                f"shape {tuple(param.shape)}; expected gradients that autograd adds. Set them in "
                f"on_after_backward, in manual optimization, or use strategy='zero2'."
            )
        SET_GRAD(param, value)
    else:
        _give_gradient(param, value)


def _give_gradient(param: nn.Parameter, value: Tensor) -> None:
    """Set `.grad` to a full tensor, a stand-in or what looks full."""
    home: ParameterHome = param.__dict__[_HOME]
    if not isinstance(value, ParameterShard):
        SET_GRAD(param, _of_full(value, param, home))
        return
    if home.note is None or not is_alike(_shard_of(param), value):
        raise ConfigError(
            f".grad of {home.spread.name!r} was set to a tensor like {value.spread.name!r} of "
            f"shape {tuple(value.shape)}, expected one of its own shape {tuple(home.spread.shape)}."
        )
    SET_GRAD(param, AveragedGradient(param, home.note, ShardedTensor(value.local, home.spread)))


def _of_full(value: Tensor, param: nn.Parameter, home: ParameterHome) -> Tensor:
    """Return this rank's elements of a full gradient that user code sets; others as they are."""
    note, is_own = home.note, isinstance(value, _SHARDS)
    if is_own or note is None or note.source is None or value.shape != home.spread.shape:
        return value
    full = note.source.operand(value, "set")
    own = home.spread.cut(full, _shard_of(param).local)
    assert own is not None
    return AveragedGradient(param, note, ShardedTensor(own, home.spread))
