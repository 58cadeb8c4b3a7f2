"""A module with a few of its blocks, on meta: what repeats is looked at once.

embed  block 0 .. block 79  norm  head   ──>   embed  block 0  block 1  norm  head
"""

import copy
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
    return blocks if len(kinds) == 1 and is_list else None


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
