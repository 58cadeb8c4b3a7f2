"""The blocks of each stage, and the stages that need the modules around the blocks.

    model        embed   block 0   block 1   block 2   block 3   norm   head
    bounds               0                   2                   4
    stage        |------- 0 ---------------| |---------- 1 ------------------|

What is registered before the block list goes to the first stage and what comes after it to the
last. The cut is the one whose most expensive stage is the cheapest, found exactly.
"""

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, TypeVar, get_args

from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import BlockList, all_children

Split = Literal["parameters", "flops", "memory"]
Stages = tuple[int, ...]

_BEFORE = -1  # the place of what is used before the first block
_Cost = Callable[[int, int], float]  # of a stage with the blocks from start to stop
_T = TypeVar("_T", bound=Tensor)


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The costs of a model's parts, in any one unit; whole numbers tie exactly."""

    before: float
    blocks: tuple[float, ...]
    after: float


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The blocks of each stage, at least one: stage s has `bounds[s] <= i < bounds[s + 1]`."""

    blocks: BlockList
    bounds: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.bounds) - 1

    def stage_of(self, block: int) -> int:
        """Return the stage that has a block."""
        return bisect_right(self.bounds, block) - 1

    def modules(self, stage: int) -> tuple[nn.Module, ...]:
        """Return a stage's blocks."""
        return self.blocks.modules[self.bounds[stage] : self.bounds[stage + 1]]


def partition_blocks(
    model: nn.Module,
    blocks: BlockList,
    *,
    num_stages: int,
    split: Split | Sequence[int] = "parameters",
    measured: BlockCosts | None = None,
) -> Partition:
    """Cut the blocks into stages.

    Args:
        model: The model that contains the blocks.
        blocks: The block list that `find_blocks` found.
        num_stages: Number of stages of the whole pipeline; a rank may have several.
        split: The cost that is balanced, or the first block of each stage but the first. Ties go to
            even numbers of blocks, then to fewer blocks on the earlier stages.
        measured: The costs that `measure_blocks` measured, for "flops" and "memory".

    Raises:
        ConfigError: Fewer blocks than stages, or an unknown or misfitting `split`.
    """
    if not 1 <= num_stages <= len(blocks):
        raise ConfigError(
            f"Use fewer ranks or fewer stages per rank, name a longer list with blocks=..., or use "
            f"strategy='zero3', which needs no blocks: {blocks.path!r} of {type(model).__name__} "
            f"has {len(blocks)} blocks, which cannot be cut into {num_stages} pipeline stages; "
            f"expected between 1 and {len(blocks)} stages."
        )
    if not isinstance(split, str):
        return Partition(blocks=blocks, bounds=_given_bounds(split, len(blocks), num_stages))
    _check_split(split)
    if split == "parameters":
        cost = _parameter_cost(model, blocks)
    else:
        if measured is None:
            raise ConfigError(f"split={split!r} balances measured costs; give those of a step.")
        cost = _measured_cost(measured)
    return Partition(blocks=blocks, bounds=best_bounds(cost, len(blocks), num_stages))


def parameter_stages(model: nn.Module, partition: Partition) -> dict[nn.Parameter, Stages]:
    """Return the stages that need each parameter, in order.

    A block's parameter is on the block's stage; one outside the blocks is on the first stage if it
    is registered before them, else on the last. One that several modules share is on the stages of
    all of them. What a module that contains the blocks has itself is on the first and the last.
    """
    return _on_stages(partition, used_at(model, partition.blocks, nn.Module.parameters))


def buffer_stages(model: nn.Module, partition: Partition) -> dict[Tensor, Stages]:
    """Return the stages that each buffer belongs to, by the rules for parameters.

    All stages keep all buffers; where a step changes one, the first of its stages has what counts.
    """
    return _on_stages(partition, used_at(model, partition.blocks, nn.Module.buffers))


def used_at(
    model: nn.Module, blocks: BlockList, tensors: Callable[..., Iterator[_T]]
) -> dict[_T, set[int]]:
    """Return where each tensor may be used: -1 before the blocks, at a block's index, or past them.

    Modules are visited at each place where they are registered, but those that contain blocks once:
    a second name of a full model says nothing of where its layers are used.
    """
    index_of = {block: index for index, block in enumerate(blocks.modules)}
    containing = {one for one in model.modules() if not index_of.keys().isdisjoint(one.modules())}
    outside = [_BEFORE]  # grows once a block has been passed
    found: dict[_T, set[int]] = {}

    def note(given: Iterable[_T], places: Iterable[int]) -> None:
        for tensor in given:
            found.setdefault(tensor, set()).update(places)

    def visit(module: nn.Module) -> None:
        if module in index_of:
            note(tensors(module), [index_of[module]])
            outside.append(len(blocks))
        elif module not in containing:
            note(tensors(module), outside[-1:])
        elif module not in entered:
            entered.add(module)
            note(tensors(module, recurse=False), [_BEFORE, len(blocks)])
            for child in all_children(module):
                visit(child)

    entered: set[nn.Module] = set()
    visit(model)
    return found


def best_bounds(cost: _Cost, num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return bounds of stages whose largest cost (of the blocks from start to stop) is least."""
    largest, _ = _cheapest(cost, max, num_blocks, num_stages)

    def unevenness(start: int, stop: int) -> float:
        return (stop - start) ** 2 if cost(start, stop) <= largest else inf

    return _cheapest(unevenness, operator.add, num_blocks, num_stages)[1]


def _cheapest(
    cost: _Cost, join: Callable[[float, float], float], num_blocks: int, num_stages: int
) -> tuple[float, tuple[int, ...]]:
    """Return the least joint cost of the stages, and bounds that have it."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(1, num_stages + 1):
        first = stage if stage < num_stages else num_blocks
        best = {
            stop: min(
                (join(total, cost(start, stop)), (*bounds, stop))
                for start, (total, bounds) in best.items()
                if start < stop
            )
            for stop in range(first, num_blocks - num_stages + stage + 1)
        }
    return best[num_blocks]


def _check_split(split: str) -> None:
    if split not in get_args(Split):
        raise ConfigError(
            f"split={split!r} is unknown; expected {', '.join(map(repr, get_args(Split)))} or the "
            f"first block of each stage but the first, such as [2, 5] for three stages."
        )


def _given_bounds(starts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    bounds = (0, *starts, num_blocks)
    rise = all(type(one) is int for one in bounds) and all(a < b for a, b in pairwise(bounds))
    if len(starts) != num_stages - 1 or not rise:
        even = [stage * num_blocks // num_stages for stage in range(1, num_stages)]
        raise ConfigError(
            f"split={list(starts)} does not cut {num_blocks} blocks into {num_stages} pipeline "
            f"stages; expected the first block of each stage but the first: {num_stages - 1} "
            f"rising indices from 1 to {num_blocks - 1}, such as {even}."
        )
    return bounds


def _measured_cost(costs: BlockCosts) -> _Cost:
    sums = (0, *accumulate(costs.blocks))

    def cost(start: int, stop: int) -> float:
        before = costs.before if start == 0 else 0
        after = costs.after if stop == len(costs.blocks) else 0
        return before + sums[stop] - sums[start] + after

    return cost


def _parameter_cost(model: nn.Module, blocks: BlockList) -> _Cost:
    """Return the function that counts the parameters of a stage, shared ones once."""
    numels = dict.fromkeys(range(_BEFORE, len(blocks) + 1), 0)
    again: list[tuple[int, int, int]] = []  # what one place after another has, too
    for param, places in used_at(model, blocks, nn.Module.parameters).items():
        for place in places:
            numels[place] += param.numel()
        again += [(*two, param.numel()) for two in pairwise(sorted(places))]
    sums = (0, *accumulate(numels.values()))

    def cost(start: int, stop: int) -> float:
        first, last = start - (start == 0), stop - (stop < len(blocks))
        twice = sum(numel for one, other, numel in again if first <= one and other <= last)
        return sums[last - _BEFORE + 1] - sums[first - _BEFORE] - twice

    return cost


def _on_stages(partition: Partition, places: Mapping[_T, set[int]]) -> dict[_T, Stages]:
    last = len(partition.blocks) - 1
    return {
        tensor: tuple(sorted({partition.stage_of(min(max(at, 0), last)) for at in found}))
        for tensor, found in places.items()
    }
