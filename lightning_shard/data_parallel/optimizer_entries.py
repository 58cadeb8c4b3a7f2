"""What an optimizer keeps: of its parameters, and of itself, under keys that are no tensors.

optimizer.state[param] = {"exp_avg": ...}      cut, joined and saved as the parameter is
optimizer.state["k"] = 7                       the same on all ranks, whatever it is

An entry may be one tensor made of several, as torchao's, or a mapping, as those that bitsandbytes
saves. Whoever cuts, sends or counts elements has the plain tensors instead, under longer keys:

    exp_avg   OptimState8bit     flattened     exp_avg         what else it has, and its class
                                 <──────────>  exp_avg.codes   uint8, an element for each
                                 joined        exp_avg.scale   an element for each block
                                               exp_avg.qmap    256 elements
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.data_parallel.memory.inner_tensors import is_composed
from lightning_shard.errors import CheckpointError


def of_parameters(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter that an optimizer keeps something of, with that."""
    return ((key, one) for key, one in optimizer.state.items() if isinstance(key, Tensor))


def of_itself(optimizer: Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps under other keys."""
    return {key: one for key, one in optimizer.state.items() if not isinstance(key, Tensor)}


def tensors_of(entries: Mapping[str, Any]) -> list[Tensor]:
    """Return the plain tensors of a parameter's entries."""
    return [value for value in flattened(entries).values() if isinstance(value, Tensor)]


def host_copy(value: Any) -> Any:
    """Return a tensor's values in new memory of the CPU, without a graph; all else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class EntryForm:
    """What an entry is besides its parts: a mapping (`kind` is dict), or a tensor of a class."""

    kind: type[Any]
    names: tuple[str, ...]
    context: Any = None
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any) -> "EntryForm | None":
        """Return the form of an entry; None where it is plain."""
        if type(value) is dict:
            has_tensors = any(isinstance(one, Tensor) for one in value.values())
            return cls(dict, tuple(value)) if has_tensors else None
        own = type(value)
        if not is_composed(value):
            return None
        names, context = value.__tensor_flatten__()
        return cls(own, tuple(names), context, tuple(value.shape))

    def part(self, value: Any, name: str) -> Any:
        """Return one of the parts of an entry of this form."""
        return value[name] if self.kind is dict else getattr(value, name)

    def of_shape(self, shape: Sequence[int]) -> "EntryForm":
        """Return the form for another shape, which some classes keep in what else they have."""
        context = self.context
        if isinstance(context, (list, tuple)):
            context = [tuple(shape) if _is_shape(one, self.shape) else one for one in context]
        return replace(self, context=context, shape=tuple(shape))

    def joined(self, parts: Mapping[str, Any]) -> Any:
        """Return the entry of this form that has these parts."""
        if self.kind is dict:
            return dict(parts)
        if not torch.Size(self.shape).numel():
            return torch.empty(self.shape)  # some classes cannot be without a block
        strides = torch.empty(self.shape, device="meta").stride()
        return self.kind.__tensor_unflatten__(parts, self.context, self.shape, strides)


torch.serialization.add_safe_globals([EntryForm])  # what folders have of such entries


def _is_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, (tuple, list)) and tuple(value) == shape


class _Shaped(Protocol):
    @property
    def shape(self) -> torch.Size: ...


@dataclass(frozen=True)
class StateBlocks:
    """Which parts of a state lie in blocks, and where shards may be cut.

        absmax1    elements 256    one scale for each block of 256 elements
        codes               2      two elements in a byte
        state1              1      an element for each of the parameter's
        qmap1               0      the same for all elements

    Attributes:
        elements: By key, as `flattened` has it, how many elements of the parameter one of the part
            stands for; 0 where it stands for all.
    """

    elements: Mapping[str, int]

    @property
    def size(self) -> int:
        """The number of elements of which a shard must have a multiple."""
        return lcm(*filter(None, self.elements.values()))

    def elements_of(self, key: str, value: "_Shaped", shape: Sequence[int]) -> int:
        """Return the same of a part of a parameter of this shape, also of one that has no blocks.

        Keys of what an optimizer saves may begin with another name.
        """
        for known in (key, str(key).partition(".")[2]):
            if known in self.elements:
                return self.elements[known]
        is_counter = not value.shape and key == "step"  # of a scalar parameter
        return int(tuple(value.shape) == tuple(shape) and not is_counter)

    def elements_of_full(self, key: str, value: "_Shaped", shape: Sequence[int]) -> int:
        """Return the same of a part of a full state, which may have been saved in other blocks."""
        elements, numel = self.elements_of(key, value, shape), torch.Size(shape).numel()
        expected, got = -(-numel // max(elements, 1)), torch.Size(value.shape).numel()
        if elements and got != expected:
            raise CheckpointError(
                f"{key!r} in a state of the optimizer has {got} elements for a parameter of "
                f"{numel}, expected {expected}, since the optimizer keeps one for {elements}. "
                f"Resume with the settings of the optimizer that it was saved with."
            )
        return elements

    def part(self, key: str, value: Any, shape: Sequence[int], own: range) -> Any:
        """Return what belongs to a range of elements, in memory of its own; `value` is full."""
        form = EntryForm.of(value)
        if form is not None:
            parts = {
                name: self.part(f"{key}.{name}", form.part(value, name), shape, own)
                for name in form.names
            }
            is_cut = form.shape == tuple(shape) and form.kind is not dict
            return (form.of_shape((len(own),)) if is_cut else form).joined(parts)
        elements = self.elements_of_full(key, value, shape) if isinstance(value, Tensor) else 0
        if not elements:
            return value.clone() if isinstance(value, Tensor) else value
        return value.flatten()[own.start // elements : -(-own.stop // elements)].clone()


def flattened(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with plain tensors only, and the forms of those that were not."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        form = EntryForm.of(value)
        found[key] = value if form is None else form
        if form is not None:
            parts = {f"{key}.{name}": form.part(value, name) for name in form.names}
            found |= flattened(parts)
    return found


def joined(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of which `flattened` has made these."""
    inner = {f"{key}.{name}" for key, one in flat.items() for name in _names(one)}
    return {key: _joined(key, flat) for key in flat if key not in inner}


def with_joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with such entries in the place of their parts."""
    entries = dict(state.get("state", {}))
    for key, of_param in entries.items():
        if isinstance(of_param, Mapping) and any(map(_names, of_param.values())):
            entries[key] = joined(of_param)
    return {**state, "state": entries} if "state" in state else dict(state)


def _names(value: Any) -> tuple[str, ...]:
    return value.names if isinstance(value, EntryForm) else ()


def _joined(key: str, flat: Mapping[str, Any]) -> Any:
    form = flat[key]
    if not isinstance(form, EntryForm):
        return form
    return form.joined({name: _joined(f"{key}.{name}", flat) for name in form.names})
