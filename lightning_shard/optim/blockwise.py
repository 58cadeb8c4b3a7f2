"""State in blocks: shards are cut where blocks end, and rules about sizes see full parameters.

    parameter    |  block  |  block  |  block  |  block  | end |
    shards       |       rank 0      |          rank 1         |
    codes        |                   |                         |    an element for each
    scales       |    .         .    |    .         .       .  |    an element for each block
    table          full                full                         the same for all

A trial on large matrices tells how many elements of a parameter each part of its state stands for.
Another takes steps on a matrix, and on shards that are cut so, which have to come out alike.

Many optimizers leave small parameters as they are, or those that are no multiple of a block. What
they are shown here are shards, of which some are smaller. So the state of a parameter is begun by a
copy of the optimizer, which is shown a full one of zeros, and what the copy keeps at first is cut.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import trial_optimizer
from lightning_shard.checkpoint.optimizer_state import is_stepped, own_state
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_entries import EntryForm, StateBlocks, flattened
from lightning_shard.optim.elementwise import Parts, Runs, is_of_torch, why_not

_SHAPES = (256, 256), (512, 256)  # above what optimizers leave as it is, and multiples of blocks
_LARGEST = 4096  # elements of a block: padding would take more
_SAMPLE = 131072  # elements, whole blocks, in whose place larger parameters are tried


def states_in_blocks(
    optimizers: Sequence[Optimizer], model: nn.Module
) -> dict[nn.Parameter, StateBlocks]:
    """Return the blocks of each parameter's state that shards must respect, of all to come."""
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    found: dict[nn.Parameter, StateBlocks] = {}
    for optimizer, group in groups:
        blocks = _blocks_of(optimizer, group)
        if (
            blocks is not None
            and why_not(optimizer, [group], InBlocks(blocks), RunsInBlocks) is None
        ):
            found |= dict.fromkeys(group["params"], blocks)
    if found:
        listed = {param for _, group in groups for param in group["params"]}
        others = [param for param in model.parameters() if param not in listed]
        found |= dict.fromkeys(others, next(iter(found.values())))
    return found


def _blocks_of(optimizer: Optimizer, group: dict[str, Any]) -> StateBlocks | None:
    """Return the blocks of the state that an optimizer makes; None where it has none."""
    if is_of_torch(optimizer):
        return None
    like = next((param for param in group["params"] if param.is_floating_point()), torch.empty(0))
    kind: Any = {"dtype": like.dtype, "device": "cpu" if like.is_meta else like.device}
    try:
        with torch.random.fork_rng(devices=[]):
            states = [
                flattened(_first_state(optimizer, group, torch.zeros(shape, **kind)))
                for shape in _SHAPES
            ]
    except Exception:  # whatever it raises, its trial says why
        return None
    elements: dict[str, int] = {}
    for key, value in states[0].items():
        if isinstance(value, Tensor) and value.ndim:
            per_part = _elements_per_part(value, states[1].get(key))
            if per_part is None:
                return None
            elements[key] = per_part
    blocks = StateBlocks(elements)
    return blocks if 1 < blocks.size <= _LARGEST else None


def bytes_in_blocks(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, float]:
    """Return the bytes of the state of each parameter of which optimizers keep it in blocks.

    Parameters need no elements: zeros of as many, or of fewer that end within a block alike, tell
    whether they are too small for blocks. What stands for all elements is not counted.
    """
    found: dict[nn.Parameter, float] = {}
    for optimizer, group in ((one, group) for one in optimizers for group in one.param_groups):
        blocks = _blocks_of(optimizer, group)
        if blocks is not None:
            sizes: dict[torch.Size, int] = {}  # by a shape
            for param in (one for one in group["params"] if one.numel()):
                shape, numel = param.shape, param.numel()
                if numel >= 2 * _SAMPLE:  # of as many dimensions, which some optimizers ask for
                    shape = torch.Size([1] * (param.ndim - 1) + [_SAMPLE + numel % _SAMPLE])
                if shape not in sizes:
                    zeros = torch.zeros(shape, dtype=param.dtype)
                    sizes[shape] = _bytes_of_elements(optimizer, group, zeros, blocks)
                found[param] = sizes[shape] * numel / shape.numel()
    return found


def _bytes_of_elements(
    optimizer: Optimizer, group: dict[str, Any], zeros: Tensor, blocks: StateBlocks
) -> int:
    state = flattened(_first_state(optimizer, group, zeros))
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return sum(
        value.nbytes
        for key, value in tensors.items()
        if blocks.elements_of(key, value, zeros.shape)
    )


def _elements_per_part(small: Tensor, large: Any) -> int | None:
    """Return how many elements of a parameter one of a part stands for; None if it is no number."""
    numels = [torch.Size(shape).numel() for shape in _SHAPES]
    if not isinstance(large, Tensor) or not small.numel():
        return None
    if large.numel() == small.numel():
        return 0
    per_part = numels[0] // small.numel()
    fits = per_part * small.numel() == numels[0] and per_part * large.numel() == numels[1]
    is_known = tuple(small.shape) == _SHAPES[0] if per_part == 1 else small.ndim == 1
    return per_part if fits and is_known else None


class _FirstValues(dict[str, Any]):
    """A state that remembers what each entry was at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, _copied(value))
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an entry, which has this value where there was none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several entries."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> "_FirstValues":  # type: ignore[override,misc]
        self.update(other)
        return self


def _copied(value: Any) -> Any:
    form = EntryForm.of(value)
    if form is not None:
        return form.joined({name: _copied(form.part(value, name)) for name in form.names})
    return value.clone() if isinstance(value, Tensor) else value


def _first_state(optimizer: Optimizer, group: dict[str, Any], zeros: Tensor) -> dict[str, Any]:
    """Return the state with which an optimizer begins for a parameter of a group."""
    param = nn.Parameter(zeros)
    options = {key: copy.copy(value) for key, value in group.items() if key != "params"}
    return _begun(optimizer, {**options, "params": [param]}, param)


def _begun(
    optimizer: Optimizer,
    group: dict[str, Any],
    param: nn.Parameter,
    groups: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return what a copy of an optimizer keeps of a parameter at first; the parameter changes."""
    trial = trial_optimizer(optimizer, group)
    state = _FirstValues()
    state.update(trial.state.get(param, {}))  # some begin in the constructor
    trial.state = defaultdict(_FirstValues, {param: state})
    if groups is not None:
        trial.param_groups = groups
    param.grad = torch.zeros_like(param)
    type(optimizer).step(trial)
    return state.first


class InBlocks:
    """Gives a matrix as parts that end where its blocks do: one block, some, and the others."""

    def __init__(self, blocks: StateBlocks) -> None:
        self.blocks = blocks

    def __call__(self, matrix: Tensor) -> list[list[Tensor]]:
        """Return the matrix, and each part, as runs of their own."""
        flat = matrix.flatten()
        return [[matrix], *([flat[own.start : own.stop]] for own in self.ranges(flat.numel()))]

    def ranges(self, numel: int) -> list[range]:
        """Return the elements of each part."""
        size = self.blocks.size
        cuts = {0, min(size, numel), numel * 5 // 12 // size * size, numel}
        return [range(start, stop) for start, stop in pairwise(sorted(cuts))]


class RunsInBlocks(Runs):
    """Trials on a whole and on its blocks, whose states begin as parts of the whole's."""

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], parts: Parts, weight: Tensor
    ) -> None:
        super().__init__(optimizer, options, parts, weight)
        assert isinstance(parts, InBlocks)
        full = _first_state(optimizer, dict(options), torch.zeros_like(weight))
        for run, own in zip(self.optimizers[1:], parts.ranges(weight.numel()), strict=True):
            (param,) = run.param_groups[0]["params"]
            run.state[param] = {
                key: parts.blocks.part(key, value, weight.shape, own) for key, value in full.items()
            }


class BegunStates:
    """Begins the state of parameters in shards as an optimizer would that has all of them."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine

    def take(self) -> None:
        """Begin the state of what the coming step updates first, inside the optimizer's view."""
        for group in self._optimizer.param_groups if self._engine.options.blocks else ():
            for param in group["params"]:
                has_state = bool(self._optimizer.state.get(param))
                if has_state or param.grad is None or param not in self._engine.options.blocks:
                    continue
                if is_stepped(param, self._engine):
                    self._begin(group, param)

    @torch.no_grad()
    def _begin(self, group: dict[str, Any], param: nn.Parameter) -> None:
        shard, grad = param.data, param.grad
        param.grad = None
        param.data = shard.new_zeros(tuple(self._engine.full_shape(param)))
        try:
            begun = _begun(
                self._optimizer, {**group, "params": [param]}, param, self._groups(param)
            )
        finally:
            param.grad = None
            param.data = shard
            param.grad = grad
        self._optimizer.state[param] = {
            key: own_state(key, value, param, self._engine) for key, value in begun.items()
        }

    def _groups(self, param: nn.Parameter) -> list[dict[str, Any]]:
        """Return the groups with nothing but one parameter in its place, which some ask for."""
        nothing = nn.Parameter(param.new_empty(0))
        return [
            {**group, "params": [one if one is param else nothing for one in group["params"]]}
            for group in self._optimizer.param_groups
        ]
