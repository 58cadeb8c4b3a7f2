"""Matching parts of a model with the same shapes in the same order, as a student and its teacher.

    net       [ embed | blocks ... | last ]      cut alike on every rank, so that code which goes
    teacher   [ embed | blocks ... | last ]      through both element by element meets equal shards
    head      [ ... ]                            in no buffer with `net`: the cuts would move

A buffer is cut wherever the cuts happen to fall, so equal tensors are cut alike only where whole
buffers are equal. Each matching part has buffers of its own for that, split by what requires
gradients in any of the matching parts. It is decided by structure alone: every rank must come to
the same.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

_MOST_LAYERS = 8  # more pairs of single layers than this are layers of one size, not matching parts


@dataclass(frozen=True, eq=False)
class _ModulePart:
    """The parameters of one module.

    Attributes:
        params: The parameters, in registration order.
        is_layer: Whether a single module holds all of them.
    """

    params: tuple[nn.Parameter, ...]
    is_layer: bool

    @property
    def shapes(self) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        """Shapes and dtypes of the parameters, which matching parts have alike."""
        return tuple((param.shape, param.dtype) for param in self.params)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters."""
        return sum(param.numel() for param in self.params)

    @property
    def is_frozen(self) -> bool:
        """Whether none of the parameters is trained."""
        return not any(param.requires_grad for param in self.params)


_Family = list[_ModulePart]  # of equal shapes


@dataclass(frozen=True)
class MatchingParts:
    """The parameters in parts of the model that have a match.

    Attributes:
        parts: By parameter, the number of the part that it is in.
        flags: By parameter, the `requires_grad` of its counterparts in all the matching parts,
            itself included.
    """

    parts: Mapping[nn.Parameter, int] = field(default_factory=dict)
    flags: Mapping[nn.Parameter, tuple[bool, ...]] = field(default_factory=dict)

    def part_of(self, param: nn.Parameter) -> int | None:
        """Return the number of the part that `param` is in; None where it has no match."""
        return self.parts.get(param)

    def flags_of(self, param: nn.Parameter) -> tuple[bool, ...]:
        """Return the flags that decide in which of a part's buffers `param` lies."""
        return self.flags.get(param, (param.requires_grad,))


def find_matching_parts(model: nn.Module, blocks: Collection[nn.Module]) -> MatchingParts:
    """Find the largest parts of a model that occur several times.

    Args:
        model: The module to search, of any kind.
        blocks: Repeated blocks, which are alike without being each other's teachers; nothing
            inside them counts.
    """
    parts: dict[nn.Parameter, int] = {}
    flags: dict[nn.Parameter, tuple[bool, ...]] = {}
    number = 0
    for family in _families(model, set(blocks)):
        if any(param in parts for part in family for param in part.params):
            continue
        for part in family:
            parts.update(dict.fromkeys(part.params, number))
            number += 1
        for counterparts in zip(*(part.params for part in family), strict=True):
            flag = tuple(param.requires_grad for param in counterparts)
            flags.update(dict.fromkeys(counterparts, flag))
    return MatchingParts(parts, flags)


def _families(model: nn.Module, blocks: set[nn.Module]) -> Iterator[_Family]:
    """Yield matching parts, the largest first."""
    by_shapes: dict[object, _Family] = {}
    for part in _parts(model, blocks):
        family = by_shapes.setdefault(part.shapes, [])
        if not any(set(one.params) & set(part.params) for one in family):  # as of a wrapper
            family.append(part)
    matching = [family for family in by_shapes.values() if len(family) > 1]
    pairs = sum(family[0].is_layer and not _are_taught(family) for family in matching)
    for family in sorted(matching, key=lambda one: -one[0].numel):
        is_match = _are_taught(family) or not all(part.is_layer for part in family)
        if is_match or (pairs <= _MOST_LAYERS and _are_two_matrices(family)):
            yield family


def _parts(model: nn.Module, blocks: set[nn.Module]) -> Iterator[_ModulePart]:
    """Yield the modules that are neither the model, a block, nor in a block."""
    for child in model.children():
        if child in blocks:
            continue
        holders = [
            m for m in child.modules() if next(m.parameters(recurse=False), None) is not None
        ]
        if holders:
            yield _ModulePart(tuple(child.parameters()), is_layer=len(holders) == 1)
            yield from _parts(child, blocks)


def _are_taught(family: _Family) -> bool:
    """Whether half of a family is frozen, as teachers are, and the other half is not."""
    return 2 * sum(part.is_frozen for part in family) == len(family)


def _are_two_matrices(family: _Family) -> bool:
    return len(family) == 2 and any(param.ndim > 1 for param in family[0].params)
