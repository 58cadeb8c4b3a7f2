"""Calls that torch shows to no class of tensors, as user code makes them with shards.

    plain.data = shard, torch.tensor(param)     a mode sees them, while a hook runs
    torch.to_dlpack(param), as_subclass         a function in its place asks classes and modes
    torch.Tensor(param), nn.Parameter(param)    made of a view, of which these are asked
    pickle.dumps(param)                         without the engine's notes on it

Without it such a call took this rank's shard for all of the parameter, or memory that nobody has.
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

from lightning_shard.data_parallel.parameter_shard import ParameterShard, ShardView
from lightning_shard.data_parallel.sharded_parameter import ShardedParameter
from lightning_shard.data_parallel.torch_private import innermost_function_mode
from lightning_shard.tensor_calls import Args

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LOOKS_FULL = (ParameterShard, ShardView, ShardedParameter)


class SeesUnseenCalls(TorchFunctionMode):
    """Gives full tensors to calls that would take a shard for one."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = self._is_entered = False

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        takes = func is torch.tensor or (func == _SET_DATA and not isinstance(args[0], _LOOKS_FULL))
        if takes and self._is_on:
            args = tree_map_only(_LOOKS_FULL, lambda one: one.full_tensor(), tuple(args))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a hook inside, which may leave a mode of its own on torch's stack, above this one."""
        before, self._is_on = self._is_on, True
        enters = not self._is_entered
        if enters:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True
        try:
            yield
        finally:
            self._is_on = before
            if enters and innermost_function_mode() is self:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._is_entered = False


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
        if args and type(args[0]) in _PARAMETERS:
            args = (args[0].view_as(args[0]), *args[1:])
        elif type(kwargs.get("data")) in _PARAMETERS:
            kwargs["data"] = kwargs["data"].view_as(kwargs["data"])
        return function(first, *args, **kwargs)

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


_PARAMETERS = (nn.Parameter, ShardedParameter)
_REDUCE: Any = nn.Parameter.__reduce_ex__
_TENSOR: Any = Tensor
_TENSOR.as_subclass = _seen(_TENSOR.as_subclass)
_TENSOR.set_, _TENSOR.new = _of_view(_TENSOR.set_), _of_view(_TENSOR.new)
_PARAMETER: Any = nn.Parameter
for made in (_TENSOR, _PARAMETER):
    made.__new__ = staticmethod(_of_view(made.__new__))
_PARAMETER.__reduce_ex__ = _reduced
for module, name in ((torch, "to_dlpack"), (dlpack, "to_dlpack"), (torch.utils, "swap_tensors")):
    vars(module)[name] = _seen(vars(module)[name])
