"""How large activations are, with and without checkpointing: dry runs in the middle of a fit.

The module of a fit is in the engine's hands: parameters may show shards, blocks have hooks and
other forwards. So a copy without hooks, of full shapes and without elements, takes the step.
"""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.recomputation import RECOMPUTED
from lightning_shard.data_parallel.torch_private import hooks_of
from lightning_shard.planner.no_elements import NoElements
from lightning_shard.trainer._lightning import runners_of
from lightning_shard.trainer.dry_run import dry_run


def estimated_activations(strategy: Any, batch: Any) -> tuple[int, int]:
    """Return the bytes that a step keeps for its backward, as it is and with "full" checkpointing.

    Args:
        strategy: The strategy of a fit whose model is not split over ranks.
        batch: A batch, whose tensors may be on meta.

    Raises:
        Exception: The step cannot be run on a copy without elements.
    """
    module = plain_copy(strategy.lightning_module, strategy.engine)
    present = strategy.engine.options.activation_checkpointing
    kept = [_kept(strategy, module, batch, choice) for choice in (present, "full")]
    return kept[0], kept[1]


def _kept(strategy: Any, module: Any, batch: Any, choice: Any) -> int:
    dry = dry_run(
        strategy.with_checkpointing(choice),
        module,
        batch,
        world_size=strategy.mesh_size,
        precision=str(strategy.precision_plugin.precision),
        ranks_per_node=strategy.mesh_size,
        state_values=0,
    )
    return dry.ranks[0].memory.activations + dry.ranks[0].memory.recomputed


def plain_copy(module: Any, engine: DataParallelEngine) -> Any:
    """Copy a module of a fit as it was before, without elements, hooks or trainer."""
    stand_ins = NoElements()
    formats = {param: flat.full.dtype for flat in engine.flats for param in flat.params}
    memo: dict[int, Any] = {id(one): None for one in runners_of(module)}
    for param in module.parameters():
        like = torch.empty(
            tuple(engine.full_shape(param)), dtype=formats.get(param, param.dtype), device="meta"
        )
        memo[id(param)] = nn.Parameter(stand_ins.tensor(like), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = stand_ins.tensor(buffer)
    for part in module.modules():
        memo |= {id(hooks): OrderedDict() for hooks in hooks_of(part)}
        if RECOMPUTED in vars(part):
            memo |= {id(vars(part)[RECOMPUTED]): None, id(vars(part)["forward"]): None}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if RECOMPUTED in vars(part):
            del vars(part)[RECOMPUTED], vars(part)["forward"]
    return copied
