"""Weights of which a rank has a part look full, in a step, to all code but their layers' own.

    layer.weight           in the layer's own forward        this rank's part
                           in user code, within a step       a tensor that looks full
    module.parameters()    called by user code               the same

A layer's class gets a property for each such weight, and one for the mapping that `parameters()`
goes through; the view, which lies in the layer, says what is seen.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.core.states import Asker, asker, having, user_asks
from lightning_shard.data_parallel.memory.assigned import taken_out
from lightning_shard.data_parallel.torch_private import (
    calls_of,
    has_compiled_call,
    is_traced,
    set_compiled_call,
)
from lightning_shard.data_parallel.views.sharded_parameter import show_kept
from lightning_shard.tensor_parallel.dim_sharded_tensor import showing

_VIEW = "_lightning_shard_view"
_TORCH_HAS = frozenset(vars(nn.Module()))


@dataclass(kw_only=True)
class WeightView(SharedByCopies):
    """Says what is seen of a layer's weights: `names` are those of which it says it, with how."""

    why: ClassVar[str]  # a parameter of the layer cannot be taken out
    layer: str
    names: Mapping[str, Any]

    def held(self, name: str, params: Mapping[str, Any]) -> Any:
        """Return what the layer holds under a parameter's name, which may have been taken out."""
        if name not in params:
            raise taken_out(f"{self.layer}.{name}", self.why)
        return params[name]

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter as the code that reads it now sees it."""
        raise NotImplementedError


@dataclass(kw_only=True)
class FullView(WeightView):
    """Shows the full shapes of a layer's weights to code outside of the layer during a step."""

    why = "ranks that share the layer have parts of it"
    widen: Callable[[Any, Tensor], Tensor]
    narrow: Callable[[Any, Tensor], Tensor]
    is_own: bool = False

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter as the code that reads it now sees it."""
        if self.is_own or name not in self.names:
            return tensor
        with having(asker, Asker.ENGINE):
            return showing(self.widen(self.names[name], tensor), tensor)

    def given(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the parts, by name, of what `functional_call` has put there and looks full."""
        parts = {}
        for name, how in self.names.items():
            tensor = self.held(name, params)
            if tensor is not None and (part := self.narrow(how, tensor)) is not tensor:
                parts[name] = part
        return parts


_KeptParameters = Sequence[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]


def _show(kept: _KeptParameters, *, seen: bool = True) -> None:
    """Let parameters that user code keeps be seen as their modules show them, or as they are."""
    for param, look in kept:
        show_kept(param, look=look if seen else None)


def _called(kept: _KeptParameters, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code, which takes plain parameters only."""
    _show(kept, seen=False)
    try:
        return call(*args, **kwargs)
    finally:
        _show(kept)


class ViewsOfKeptParameters:
    """Lets parameters that user code keeps beside modules be seen as modules' views show them.

    A module may keep parameters in lists of its own; one that optimizes by hand may have all of
    them from its optimizers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: _KeptParameters | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show them inside as the views do; at the first time they are looked for."""
        kept, self._kept = self._find() if self._kept is None else self._kept, ()
        compiled = [one for one in self._model.modules() if kept and has_compiled_call(one)]
        inner = {part for one in compiled for part in one.modules() if part is not one}
        calls = [(module, calls_of(module)[0]) for module in compiled if module not in inner]
        for module, call in calls:
            set_compiled_call(module, partial(_called, kept, call))
        _show(kept)
        try:
            yield
        finally:
            self._kept = kept or self._kept  # a step within a step has shown none
            _show(kept, seen=False)
            for module, call in calls:
                set_compiled_call(module, call)

    def _find(self) -> _KeptParameters:
        modules = list(self._model.modules())
        attributes = [
            value
            for module in modules
            for name, value in vars(module).items()
            if name not in _TORCH_HAS
        ]
        kept = {one for one in tree_leaves(attributes) if isinstance(one, nn.Parameter)}
        by_hand = not getattr(self._model, "automatic_optimization", True)
        return [
            (param, partial(view.of, name))
            for module in modules
            if (view := view_of(module)) is not None
            for name, param in vars(module)["_parameters"].items()
            if name in view.names and (by_hand or param in kept)
        ]


def view_of(module: nn.Module) -> WeightView | None:
    """Return what says how a module's weights are seen; None where they are seen as they are."""
    return vars(module).get(_VIEW)


def set_view(module: nn.Module, view: WeightView | None) -> None:
    """Let a module's weights be seen by a view, of which its class asks; None ends that."""
    if view is None:
        vars(module).pop(_VIEW, None)
    else:
        vars(module)[_VIEW] = view


def seeing(names: Iterable[str]) -> dict[str, Any]:
    """Return what a class needs so that parameters of these names are seen by a view."""
    found: dict[str, Any] = {name: _seen_full(name) for name in names}
    if found:
        found["_parameters"] = _LISTED
    return found


@cache
def _seen_full(name: str) -> property:
    """Return the property by which a parameter is read, which shows it full."""

    def get(self: Any) -> Tensor:
        view, params = view_of(self), self.__dict__["_parameters"]
        return params[name] if view is None else view.of(name, view.held(name, params))

    def put(self: Any, value: Any) -> None:
        if (view := view_of(self)) is not None:
            view.held(name, self.__dict__["_parameters"])
        nn.Module.__setattr__(self, name, value)

    return property(get, put)


class _Listed(UserDict[str, Any]):
    """A layer's parameters, of which user code that lists them gets what it sees."""

    def __init__(self, own: dict[str, Any], seen: Mapping[str, Any]) -> None:
        self.data, self._seen = own, seen

    @override
    def items(self) -> Any:
        return self._seen.items()


def _listed_full(module: nn.Module) -> Mapping[str, Any]:
    """Return a layer's parameters, full where `parameters()` lists them for the user's code."""
    own: dict[str, Any] = module.__dict__["_parameters"]
    view = view_of(module)
    if view is None or torch.compiler.is_compiling() or is_traced() or not user_asks():
        return own
    seen = {name: view.of(name, param) for name, param in own.items()}
    return _Listed(own, seen) if any(seen[name] is not own[name] for name in own) else own


_LISTED = property(_listed_full)
