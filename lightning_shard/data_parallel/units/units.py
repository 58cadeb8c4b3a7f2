"""Finding the units: which parameters are communicated together, and which modules use them.

    model
    |- embed           root unit     unsharded for the whole step
    |- blocks          (ModuleList of equal blocks)
    |    |- 0      |    |- 1  /       unit          small neighbours joined up to `bucket_mb`
    |    |- 2      |    |- 3  /       unit
    |- norm, head      root unit

A block's parameters are only used inside the block's own forward, so stage 3 may reshard them in
between. Everything else, and every parameter that two units share (tied weights), is in the root
unit. No unit reaches across the border of a part that has a match: see `MatchingParts`.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn

from lightning_shard.core.modules import is_scripted
from lightning_shard.errors import ConfigError

_MB = 1024 * 1024
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_MOST_LAYERS = 8  # more pairs of single layers than this are layers of one size, not matching parts


@dataclass(frozen=True, eq=False)
class _ModulePart:
    """The parameters of one module."""

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
_Block = tuple[str, nn.Module]
_Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class MatchingParts:
    """The parameters in parts of the model that have a match, by structure alone.

    net       [ embed | blocks ... | last ]      cut alike on every rank, so that code which goes
    teacher   [ embed | blocks ... | last ]      through both element by element meets equal shards
    head      [ ... ]                            in no buffer with `net`: the cuts would move

    Equal tensors are cut alike only where whole buffers are equal. So each matching part has
    buffers of its own, split by what requires gradients in any of the matching parts.
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
    """Find the largest parts of a model that occur several times."""
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
    by_shapes: dict[object, tuple[_Family, set[nn.Parameter]]] = {}
    for part in _parts(model, blocks):
        family, params = by_shapes.setdefault(part.shapes, ([], set()))
        if params.isdisjoint(part.params):  # else it is of a wrapper
            family.append(part)
            params.update(part.params)
    matching = [family for family, _ in by_shapes.values() if len(family) > 1]
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


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The parameters of one unit, by canonical name, and the modules whose forward needs them."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[tuple[str, nn.Parameter], ...]
    matching: MatchingParts = field(default_factory=MatchingParts)

    @property
    def is_root(self) -> bool:
        """Whether any module may use these parameters at any time in a step."""
        return not self.modules


def find_units(
    model: nn.Module,
    *,
    classes: Sequence[str] | None,
    bucket_mb: float,
    is_here: Callable[[nn.Parameter], bool] = lambda param: True,
    undivided: Container[nn.Module] = (),
) -> list[UnitSpec]:
    """Split the model's parameters into units, in registration order.

    Args:
        model: Any module; tied parameters appear once.
        classes: Class names of the blocks; None takes the repeated children of lists.
        bucket_mb: Size in MB up to which neighbouring blocks are joined.
        is_here: Returns whether this rank has a parameter; others are in no unit.
        undivided: Lists whose children are no blocks.
    """
    blocks = list(named_blocks(model, classes, undivided=undivided))
    owner = _owners(model, blocks)
    matching = find_matching_parts(model, [block for _, block in blocks])

    def block_of(named: _Named) -> _Block | None:
        index = owner[id(named[1])]
        return None if index is None else blocks[index]

    here = [named for named in model.named_parameters() if is_here(named[1])]
    runs = groupby(here, lambda one: (block_of(one) is None, matching.part_of(one[1])))
    return [
        UnitSpec(
            name=held[0][0] if held else "root",
            modules=tuple(module for _, module in held),
            params=params,
            matching=matching,
        )
        for _, run in runs
        for held, params in _in_buckets(run, block_of, bucket_mb * _MB)
    ]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, or of the class that it `stands_for` while split."""
    kind = type(module)
    return str(vars(kind).get("stands_for", kind.__name__))


def named_blocks(
    model: nn.Module,
    classes: Sequence[str] | None,
    *,
    option: str = "units",
    undivided: Container[nn.Module] = (),
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost blocks by name: none lies inside another, or in `undivided` lists.

    Without `classes`, these are the repeated children of lists.

    Raises:
        ConfigError: The `option` that has named the classes names one that the model lacks.
    """
    if classes is None:
        yield from _repeated_children("", model, undivided)
        return
    present = {class_name(module) for module in model.modules()}
    for wanted in classes:
        if wanted not in present:
            near = difflib.get_close_matches(wanted, present) or sorted(present)[:8]
            raise ConfigError(
                f"{option} names the class {wanted!r}, which this model does not contain; "
                f"it contains {', '.join(near)}."
            )
    yield from _instances("", model, frozenset(classes))


def _repeated_children(
    prefix: str, module: nn.Module, undivided: Container[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in undivided:
        return
    repeats = _repeats(module)
    for name, child in module.named_children():
        if repeats and _may_be_block(child) and _is_whole(child):
            yield f"{prefix}{name}", child
        else:
            yield from _repeated_children(f"{prefix}{name}.", child, undivided)


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a list in which a class comes twice."""
    if not isinstance(module, _CONTAINERS):
        return False
    counts = Counter(type(child) for child in module.children() if _may_be_block(child))
    return any(count > 1 for count in counts.values())


def _is_whole(module: nn.Module) -> bool:
    """Whether a module of a list is one block, as sequences of different modules are."""
    if not isinstance(module, _CONTAINERS):
        return True
    is_called = isinstance(module, nn.Sequential) and not _repeats(module)
    return is_called and all(map(_is_whole, module.children()))


def _instances(
    prefix: str, module: nn.Module, classes: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if class_name(child) in classes and _may_be_block(child):
            yield f"{prefix}{name}", child
        else:
            yield from _instances(f"{prefix}{name}.", child, classes)


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has parameters and can be hooked, which one of TorchScript cannot."""
    return next(module.parameters(), None) is not None and not is_scripted(module)


def _owners(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[int, int | None]:
    """Map the id of each parameter to its block, or None when several places use it."""
    owner: dict[int, int | None] = {}
    for index, (_, block) in enumerate(blocks):
        for param in block.parameters():
            owner[id(param)] = None if owner.get(id(param), index) != index else index
    seen = {id(block) for _, block in blocks}
    for module in _reachable(model, seen):
        owner.update((id(param), None) for param in module.parameters(recurse=False))
    return owner


def _reachable(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield every module that a path leads to without passing one of `seen`, which grows."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _reachable(child, seen)


def _in_buckets(
    run: Iterator[_Named], block_of: Callable[[_Named], _Block | None], most_bytes: float
) -> Iterator[tuple[tuple[_Block, ...], tuple[_Named, ...]]]:
    """Cut a run of parameters before each block, or parameter of none, that has no room left."""
    blocks: dict[_Block, None] = {}
    taken: list[_Named] = []
    held = 0
    for named in run:
        block = block_of(named)
        if block is None or block not in blocks:
            added = _size(named[1]) if block is None else sum(map(_size, block[1].parameters()))
            if taken and held + added > most_bytes:
                yield tuple(blocks), tuple(taken)
                blocks, taken, held = {}, [], 0
        if block is not None:
            blocks[block] = None
        taken.append(named)
        held += _size(named[1])
    yield tuple(blocks), tuple(taken)


def _size(tensor: nn.Parameter) -> int:
    return tensor.numel() * tensor.element_size()
