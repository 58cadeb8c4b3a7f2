"""Parameters that a failed or abandoned run leaves cut: no other engine takes them as they are."""

import torch
from torch import nn

from lightning_shard.data_parallel.memory.flat_memory import blank, full_views
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.errors import ConfigError

_LEFTOVER = "_lightning_shard_shard"  # set on such parameters


def give_back(flat: FlatParameters, *, keep: bool) -> None:
    """Give a buffer's parameters full memory of their own, and let go of its; each rank must call.

    Those not kept are NaNs without memory. The layout says how optimizers' states are cut.
    """
    for param, value in zip(flat.params, flat.full_values(), strict=True):
        param.data = value.clone() if keep else blank((), value.dtype).expand(value.shape)
    full, shard = (torch.empty_like(one, device="meta") for one in (flat.full, flat.shard))
    flat.full, flat.shard, flat.host, flat.common, flat.left = full, shard, None, None, None
    flat.full_views = full_views(full, flat.layout)
    flat.local_views = flat.master_views = flat.shard_views(shard)


def is_given_back(flat: FlatParameters) -> bool:
    """Whether a buffer has given its parameters back, and shows nothing any more."""
    return flat.full.is_meta


def mark_leftover(param: nn.Parameter) -> None:
    """Note that a parameter is left without its full value."""
    setattr(param, _LEFTOVER, True)


def take_leftovers(model: nn.Module) -> None:
    """Let a new engine take a model that another has abandoned; its values must come after that."""
    for param in model.parameters():
        vars(param).pop(_LEFTOVER, None)


def refuse_leftover_shards(model: nn.Module) -> None:
    """Raise ConfigError for a model that a failed run has left in shards."""
    for name, param in model.named_parameters():
        if hasattr(param, _LEFTOVER):
            raise ConfigError(
                f"The parameter {name!r} of {type(model).__name__} is only one rank's shard, left "
                f"by a run of ZeRO stage 3, tensor or pipeline parallel that failed; expected a "
                f"full model. Build a new one, or load a checkpoint into a new one."
            )
