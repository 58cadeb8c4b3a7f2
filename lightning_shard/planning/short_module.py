"""A module with a few of its blocks, on meta: what repeats is looked at once.

embed  block 0 .. block 79  norm  head   ──>   embed  block 0  block 1  norm  head
"""

import copy
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import BlockList, find_blocks
from lightning_shard.trainer._lightning import runners_of


def on_meta(module: "pl.LightningModule") -> "pl.LightningModule":
    """Return a copy whose parameters and buffers have shapes and no elements; ties stay ties."""
    memo: dict[int, Any] = {id(one): None for one in runners_of(module)}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def repeated_blocks(module: nn.Module) -> BlockList | None:
    """Return the list of a module's blocks if there is one and its blocks are alike."""
    try:
        blocks = find_blocks(module)
    except ConfigError:
        return None
    kinds = {(type(block), _shapes(block)) for block in blocks.modules}
    is_list = isinstance(module.get_submodule(blocks.path), nn.ModuleList | nn.Sequential)
    return blocks if len(kinds) == 1 and is_list and _are_set_alike(blocks.modules) else None


def _are_set_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in nothing that they are told but their number (a sliding window)."""
    told = [_settings(block) for block in blocks]
    if any(one.keys() != told[0].keys() for one in told):
        return False
    columns = ([one[name] for one in told] for name in told[0])
    return all(_is_constant(values) or _counts(values) for values in columns)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return the flags, names and whole numbers of a block's modules, and their classes."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path] = type(module)
        values = {name: value for name, value in vars(module).items() if name != "training"}
        found |= {
            f"{path}:{name}": value
            for name, value in values.items()
            if value is None or isinstance(value, bool | int | str)
        }
    return found


def _is_constant(values: Sequence[Any]) -> bool:
    return all(type(one) is type(values[0]) and one == values[0] for one in values)


def _counts(values: Sequence[Any]) -> bool:
    return all(type(one) is int and one == values[0] + place for place, one in enumerate(values))


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())


def shortened(
    module: "pl.LightningModule", blocks: BlockList, num_blocks: int
) -> "pl.LightningModule":
    """Return a copy on meta with the first `num_blocks` blocks, the last repeated if too few."""
    made = on_meta(module)
    container: Any = made.get_submodule(blocks.path)
    del container[num_blocks:]
    while len(container) < num_blocks:
        container.append(copy.deepcopy(container[-1]))
    return made
