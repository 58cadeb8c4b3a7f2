"""Functions that refer to a module, in a copy of the module: they must refer to the copy.

    self.scaled = lambda x: self.scale * x              a closure
    layer.register_forward_hook(partial(keep, self))    a hook
    self.loss = torch.compile(self.loss)                compiled code
    block.compile()                                     as well

A deep copy shares functions: called on another rank, each of these would compute with rank 0's
module, and only rank 0's parameters would have gradients. So they are made anew for each copy.
"""

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_shard.launchers._torch import compile_again, uncompiled

_TABLES = ("_parameters", "_buffers", "_modules")
_FUNCTIONS = (FunctionType, MethodType, partial)


def bind_to_copies(module: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let the functions that the copies of a module and its parts hold refer to the copies.

    Args:
        module: The original.
        memo: Of its deep copy.
    """
    binding = _Binding(memo)
    for part in module.modules():
        copied = memo.get(id(part))
        if not isinstance(copied, nn.Module):
            continue
        binding.bind_all({k: v for k, v in vars(copied).items() if k not in _TABLES}, vars(copied))
        if part._compiled_call_impl is not None:  # which a plain module's copy has not
            copied._compiled_call_impl = binding.bound(part._compiled_call_impl)


class _Binding:
    """Exchanges what functions refer to by its copies.

    Args:
        memo: The copies, by the ids of the originals.
    """

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        self._known: dict[int, Any] = {}  # by the ids of functions and of their cells

    def bind_all(self, values: Mapping[Any, Any], home: MutableMapping[Any, Any]) -> None:
        """Exchange the functions among `values`, and in the dictionaries and lists there."""
        for name, value in values.items():
            if isinstance(value, dict):
                self.bind_all(dict(value), value)
            elif isinstance(value, list):
                if any(isinstance(one, _FUNCTIONS) for one in value):
                    value[:] = map(self.bound, value)
            elif (bound := self.bound(value)) is not value:
                home[name] = bound

    def bound(self, value: Any) -> Any:
        """Return the value, or what refers to the copies where it refers to the originals."""
        if isinstance(value, FunctionType):
            if id(value) not in self._known:
                self._known[id(value)] = value  # while its own cells are looked at
                self._known[id(value)] = self._function(value)
            return self._known[id(value)]
        if isinstance(value, MethodType):
            return self._method(value)
        if isinstance(value, partial):
            return self._partial(value)
        return self._memo.get(id(value), value) if isinstance(value, nn.Module) else value

    def _method(self, method: MethodType) -> MethodType:
        function, owner = self.bound(method.__func__), self._memo.get(id(method.__self__))
        if function is method.__func__ and owner is None:
            return method
        return MethodType(function, method.__self__ if owner is None else owner)

    def _partial(self, value: "partial[Any]") -> "partial[Any]":
        function, args = self.bound(value.func), tuple(map(self.bound, value.args))
        kwargs = {name: self.bound(one) for name, one in value.keywords.items()}
        before = (value.func, *value.args, *value.keywords.values())
        after = (function, *args, *kwargs.values())
        if all(one is other for one, other in zip(before, after, strict=True)):
            return value
        return type(value)(function, *args, **kwargs)

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        written = uncompiled(function)
        if written is not None:
            bound = self.bound(written)
            return function if bound is written else compile_again(function, bound)
        cells = function.__closure__ or ()
        bound_cells = tuple(map(self._cell, cells))
        if all(one is other for one, other in zip(cells, bound_cells, strict=True)):
            return function
        copied = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            bound_cells,
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__dict__.update(function.__dict__)
        return copied

    def _cell(self, cell: CellType) -> CellType:
        """Return the cell, or one of its own for all functions of the copies."""
        if id(cell) not in self._known:
            try:
                content = cell.cell_contents
            except ValueError:  # nothing is in it yet
                return cell
            bound = self.bound(content)
            self._known[id(cell)] = cell if bound is content else CellType(bound)
        known: CellType = self._known[id(cell)]
        return known
