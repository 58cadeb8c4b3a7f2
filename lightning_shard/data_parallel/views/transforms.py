"""Refuses torch's function transforms (`torch.func.grad`, `vmap`, `jvp`) where ranks share a model.

A transform sees what one rank does only: neither messages nor other stages are part of it.
"""

from torch import Tensor

from lightning_shard.core.placeholders import NEED_ELEMENTS
from lightning_shard.data_parallel.torch_private import (
    in_transform,
    is_batched,
    is_recorded_as_graph,
)
from lightning_shard.errors import ConfigError

OF_RANKS = "A layer that ranks share, or a sequence,"
OF_STAGES = "A block of a pipeline"
OF_SHARDS = "A layer whose parameters are gathered for its forward"

NEED_ELEMENTS.append(in_transform)  # they look into results, of which stand-ins know nothing


def transform_refused(what: str) -> ConfigError:
    """Return the error for what is computed inside of a transform: `OF_RANKS` or the like."""
    return ConfigError(
        f"{what} is computed inside torch.func.grad, vmap or another of torch's function "
        f"transforms, which see what one rank does only. Leave the layer out of the plan, "
        f"use torch.autograd.grad, or use strategy='zero2'."
    )


def refuse_transforms(what: str, *given: Tensor) -> None:
    """Raise ConfigError inside of a transform, or where rows of gradients are given as a batch."""
    if in_transform() or any(map(is_batched, given)):
        raise transform_refused(what)


def refuse_recording() -> None:
    """Raise where operations on shards would be recorded, of which a graph can have no messages."""
    if is_recorded_as_graph():
        raise transform_refused(OF_SHARDS)
