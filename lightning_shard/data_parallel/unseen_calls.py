"""Calls that torch shows to no class of tensors, as user code makes them with shards.

    plain.data = shard, torch.tensor(param)     a mode sees them, while a hook runs
    torch.to_dlpack(param)                      a function in its place asks classes and modes

Without it such a call took this rank's shard for all of the parameter, or memory that nobody has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils import dlpack
from torch.utils._pytree import tree_map_only

from lightning_shard.data_parallel.parameter_shard import ParameterShard, ShardView
from lightning_shard.data_parallel.sharded_parameter import ShardedParameter
from lightning_shard.data_parallel.torch_private import innermost_function_mode

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LOOKS_FULL = (ParameterShard, ShardView, ShardedParameter)


class SeesUnseenCalls(TorchFunctionMode):
    """Gives full tensors to calls that would take a shard for one."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = self._is_entered = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
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
        if has_torch_function_unary(tensor):
            return handle_torch_function(called, (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return called


for module in (torch, dlpack):
    vars(module)["to_dlpack"] = _seen(vars(module)["to_dlpack"])
