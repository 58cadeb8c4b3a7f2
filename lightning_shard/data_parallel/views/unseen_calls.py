"""Calls that torch shows to no class of tensors, as user code makes them with shards.

tensor.grad = shard, torch.tensor(param)    a mode sees them, while a hook runs
torch.to_dlpack(param), as_subclass         a function in its place asks classes and modes
torch.Tensor(param), nn.Parameter(param)    made of a view, of which these are asked
torch.FloatTensor(param), vmap, scripted    what is in their place, while user code runs, too
pickle.dumps(param)                         without the engine's notes on it
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils import dlpack
from torch.utils._pytree import tree_map_only

from lightning_shard.core.tensor_calls import SET_DATA, SET_GRAD, Args
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.torch_private import (
    TRANSFORM_ENTRANCES,
    innermost_function_mode,
)
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView
from lightning_shard.data_parallel.views.sharded_parameter import ShardedParameter

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_LOOKS_FULL = (ParameterShard, ShardView, ShardedParameter)


class ModeInHooks(TorchFunctionMode):
    """A mode for hooks, which may leave one of their own on torch's stack, above this one."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on_stack = False

    def turn(self, *, on: bool) -> bool:
        """Go on the stack or off it; returns whether it has: not off it below another mode."""
        if on is self._is_on_stack or not (on or innermost_function_mode() is self):
            return False
        if on:
            self.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_on_stack = on
        return True


class SeesUnseenCalls(ModeInHooks):
    """Gives full tensors to calls that would take a shard for one."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # which cannot compare with properties of ours
            return func(*args, **kwargs)
        is_set = func == SET_GRAD and not isinstance(args[0], _LOOKS_FULL)
        in_hook = Phase.HOOK in self._phases.open
        if in_hook and (is_set or (func in _MAKERS and _copies(func, *args, **kwargs))):
            args, kwargs = _in_full((tuple(args), kwargs))
        if in_hook and func == SET_DATA and type(args[1]) is AveragedGradient:
            args = (args[0], args[1].full_tensor())
        return func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a hook inside."""
        turned = self.turn(on=True)
        try:
            with makers_seen(), self._phases.within(Phase.HOOK):
                yield
        finally:
            if turned:
                self.turn(on=False)


@contextmanager
def makers_seen() -> Iterator[None]:
    """Let torch's functions and classes that ask nobody take views of parameters inside."""
    _Maker.num_users += 1
    for module, name, made, _ in _PLACES:
        vars(module)[name] = made
    try:
        yield
    finally:
        _Maker.num_users -= 1
        for module, name, _, own in () if _Maker.num_users else _PLACES:
            vars(module)[name] = own


class _Maker(type):
    """The class of those that stand in the place of `torch.FloatTensor` and its like."""

    own: Any
    num_users = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.own(*map(_viewed, args), **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.own)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.own, name)


def _in_full(given: Any) -> Any:
    return tree_map_only(_LOOKS_FULL, lambda one: one.full_tensor(), given)


def _copies(func: Any, data: Any = None, *_: Any, copy: Any = False, **__: Any) -> bool:
    return func is torch.tensor or copy or not isinstance(data, Tensor)


def _viewed(data: Any, made: Any = Tensor) -> Any:
    """Return a view of a parameter; in full what looks full, in a list or for another class."""
    is_asked = type(data) is nn.Parameter and innermost_function_mode() is not None
    if is_asked or type(data) is ShardedParameter:
        data = data.view_as(data)
    first = data
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    is_plain = first is data and (not isinstance(made, type) or made in (Tensor, nn.Parameter))
    return data if is_plain or not isinstance(first, _LOOKS_FULL) else _in_full(data)


def _seen(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [one for one in (tensor, *args) if isinstance(one, Tensor)]
        if has_torch_function(given):
            return handle_torch_function(called, given, tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return called


def _of_view(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function a view in the place of a parameter that is its second argument."""

    @wraps(function)
    def called(first: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_viewed(args[0], first), *args[1:])
        elif "data" in kwargs:
            kwargs["data"] = _viewed(kwargs["data"], first)
        return function(first, *args, **kwargs)

    return called


def _of_views(function: Callable[..., Any], *, in_full: bool = False) -> Callable[..., Any]:
    """Give a function views in the places of parameters, or all that looks full in full."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = tree_map_only(nn.Parameter, _viewed, (args, kwargs))
        args, kwargs = _in_full(given) if in_full else given
        return function(*args, **kwargs)

    return called


def _reduced(param: nn.Parameter, protocol: int) -> Any:
    """Reduce a parameter to what pickles, in memory of its own and without this package's notes."""
    own = {key: one for key, one in vars(param).items() if not _is_note(key, one)}
    if type(param) is nn.Parameter and len(own) < len(vars(param)):
        param = nn.Parameter(param.detach().clone(), param.requires_grad)
        vars(param).update(own)
    return _REDUCE(param, protocol)


def _is_note(key: str, value: object) -> bool:
    package = __name__.partition(".")[0]
    return key.startswith(f"_{package}_") or type(value).__module__.startswith(f"{package}.")


_REDUCE: Any = nn.Parameter.__reduce_ex__
_TENSOR: Any = Tensor
_TENSOR.as_subclass = _seen(_TENSOR.as_subclass)
for called in ("set_", "new", "new_tensor"):
    setattr(_TENSOR, called, _of_view(getattr(_TENSOR, called)))
_PARAMETER: Any = nn.Parameter
for made in (_TENSOR, _PARAMETER):
    made.__new__ = staticmethod(_of_view(made.__new__))
_PARAMETER.__reduce_ex__ = _reduced
_SCRIPTED: Any = torch.jit.ScriptFunction
_SCRIPTED.__call__ = _of_views(_SCRIPTED.__call__)
for module, name in ((torch, "to_dlpack"), (dlpack, "to_dlpack"), (torch.utils, "swap_tensors")):
    vars(module)[name] = _seen(vars(module)[name])
_FORMATS = ("DoubleTensor", "FloatTensor", "HalfTensor", "BFloat16Tensor")
_PLACES = [
    *(
        (module, name, _Maker(f"{module.__name__}.{name}", (), {"own": own}), own)
        for module in (torch, torch.cuda)
        for name in _FORMATS
        if (own := vars(module)[name])
    ),
    *(
        (module, name, _of_views(own, in_full=True), own)
        for module, name in TRANSFORM_ENTRANCES
        if (own := vars(module)[name])
    ),
]
