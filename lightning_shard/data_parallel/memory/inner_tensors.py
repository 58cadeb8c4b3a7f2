"""Frozen parameters made of several tensors: a run places their inner tensors as its parameters.

    outside a run     weight               codes and scales in one tensor, as torchao quantises
    in a run          weight.qdata         frozen parameters like any other: in flat buffers and
                      weight.scale         shards, on the rank of a stage, by name in checkpoints
    read in a run     layer.weight         made of what these show, at each access

A class of tensors tells its inner tensors by `__tensor_flatten__`, which torch asks of whatever is
compiled, and is made of others by `__tensor_unflatten__`; inner tensors may be made of several
themselves. Inner tensors keep their digits: none is rounded for autocast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.core.extensions import extend_class, give_class_back
from lightning_shard.core.modules import hookable
from lightning_shard.core.placeholders import Placeholder

_MADE = "_lightning_shard_made_of_inner"  # set on modules, by the name of a parameter
_IS_INNER = "_lightning_shard_is_inner"  # set on their parameters


@dataclass(frozen=True, kw_only=True)
class _Composition:
    """How one tensor is made of several: its class, and that of each inner tensor."""

    kind: Any
    context: Any
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    inner: Mapping[str, "_Composition | None"]

    def join(self, prefix: str, parts: Mapping[str, Any]) -> Tensor:
        """Make the tensor of its inner ones, which are there by `prefix` and their names.

        Of placeholders it is one, too: another stage of a pipeline has the elements.
        """
        inner = {
            name: parts[f"{prefix}.{name}"] if one is None else one.join(f"{prefix}.{name}", parts)
            for name, one in self.inner.items()
        }
        absent = next((one for one in inner.values() if isinstance(one, Placeholder)), None)
        if absent is not None:
            like = torch.empty(self.shape, dtype=self.dtype, device="meta")
            return Placeholder(like, absent.place, absent.origin)
        joined: Tensor = self.kind.__tensor_unflatten__(
            inner, self.context, self.shape, self.stride
        )
        return joined


def is_composed(tensor: Any) -> bool:
    """Whether a tensor is made of several, by a class that is not torch's own."""
    kind = type(tensor)
    known = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return known and not kind.__module__.startswith("torch.")


def is_inner(tensor: Tensor) -> bool:
    """Whether a parameter is an inner tensor of one that a run has taken apart."""
    return hasattr(tensor, _IS_INNER)


def is_taken_apart(module: nn.Module) -> bool:
    """Whether a run takes parameters of a module, or of one in it, apart, or has done so."""
    made = any(_MADE in vars(one) for one in module.modules())
    return made or any(map(is_composed, module.parameters()))


def with_changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor, or one that is made of several of them, changed."""
    if not is_composed(tensor):
        return change(tensor)
    inner: dict[str, nn.Parameter] = {}
    made = _decompose(tensor, "", inner)
    return made.join("", {name: change(one) for name, one in inner.items()})


def take_apart(model: nn.Module) -> None:
    """Let the inner tensors of a model's frozen parameters be its parameters."""
    known: dict[nn.Parameter, tuple[_Composition, dict[str, nn.Parameter]]] = {}
    for module in hookable(model):
        for name, param in list(module._parameters.items()):
            if param is None or param.requires_grad or not is_composed(param):
                continue
            if param not in known:
                inner: dict[str, nn.Parameter] = {}
                known[param] = _decompose(param, "", inner), inner
            _replace(module, name, *known[param])


def _decompose(tensor: Any, path: str, found: dict[str, nn.Parameter]) -> _Composition:
    """Return how a tensor is made; its inner tensors are put into `found` as parameters."""
    names, context = tensor.__tensor_flatten__()
    inner: dict[str, _Composition | None] = {}
    for name in names:
        one = getattr(tensor, name)
        if is_composed(one):
            inner[name] = _decompose(one, f"{path}.{name}", found)
            continue
        inner[name] = None
        part = one if is_inner(one) else nn.Parameter(one.detach(), requires_grad=False)
        vars(part)[_IS_INNER] = True
        found[f"{path}.{name}"] = part
    return _Composition(
        kind=type(tensor),
        context=context,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride(),
        inner=inner,
    )


def _replace(
    module: nn.Module, name: str, made: _Composition, inner: Mapping[str, nn.Parameter]
) -> None:
    names = list(module._parameters)
    after = {one: module._parameters.pop(one) for one in names[names.index(name) :]}
    after.pop(name)
    module._parameters.update({f"{name}{path}": part for path, part in inner.items()} | after)
    vars(module).setdefault(_MADE, {})[name] = made
    extend_class(module, "Composed", _Composed, {name: _read(name)})


class _Composed:
    """A layer whose parameter is made of its inner tensors at each access."""


@cache
def _read(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        made: _Composition = vars(module)[_MADE][name]
        return made.join(name, module._parameters)

    return property(read)


def put_together(model: nn.Module) -> None:
    """Undo `take_apart`: parameters are made of their inner tensors, which are full again."""
    known: dict[nn.Parameter, nn.Parameter] = {}  # by the first of their inner tensors
    for module in [one for one in hookable(model) if _MADE in vars(one)]:
        for name, made in vars(module).pop(_MADE).items():
            give_class_back(module, [_Composed])
            _join_again(module._parameters, name, made, known)


def composed_names(model: nn.Module) -> dict[str, _Composition]:
    """Return how the parameters are made that a run has taken apart, by their names."""
    return {
        f"{path}.{name}" if path else name: one
        for path, module in model.named_modules(remove_duplicate=False)
        for name, one in vars(module).get(_MADE, {}).items()
    }


def join_entries(model: nn.Module, state: dict[str, Any]) -> None:
    """Let a state that is saved have parameters where it has inner tensors of them."""
    for name, made in composed_names(model).items():
        own = [key for key in state if key.startswith(f"{name}.")]
        if own:
            joined = made.join(name, state)
            for key in own:
                del state[key]
            state[name] = joined


def inner_entries(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state that is loaded as the inner tensors of a model that a run has taken apart."""
    taken = [name for name in composed_names(model) if name in state]
    if not taken:
        return state
    inner = {**state}
    for name in taken:
        found: dict[str, nn.Parameter] = {}
        _decompose(inner.pop(name), name, found)
        inner.update(found)
    return inner


def take_entries_apart(model: nn.Module, state: dict[str, Any]) -> None:
    """Let a state that is loaded have inner tensors where it has parameters made of them."""
    inner = {**inner_entries(model, state)}
    state.clear()
    state.update(inner)


def _join_again(
    params: dict[str, nn.Parameter | None],
    name: str,
    made: _Composition,
    known: dict[nn.Parameter, nn.Parameter],
) -> None:
    before = list(params.items())
    names = [key for key, _ in before if key.startswith(f"{name}.")]
    first: Any = params[names[0]]
    if first not in known:
        known[first] = nn.Parameter(made.join(name, params), requires_grad=False)
    params.clear()  # it keeps its place among the others
    for key, one in before:
        if key == names[0]:
            params[name] = known[first]
        elif key not in names:
            params[key] = one
