"""Refuses torch's function transforms (`torch.func.grad`, `vmap`, `jvp`) where ranks share a model.

A transform sees what one rank does only: neither messages nor other stages are part of it.
"""

from lightning_shard.data_parallel.torch_private import in_transform
from lightning_shard.errors import ConfigError

OF_RANKS = "A layer that ranks share, or a sequence,"
OF_STAGES = "A block of a pipeline"
OF_SHARDS = "A layer whose parameters are gathered for its forward"


def refuse_transforms(what: str) -> None:
    """Raise inside of a function transform.

    Args:
        what: What is computed there: `OF_RANKS`, `OF_STAGES` or `OF_SHARDS`.

    Raises:
        ConfigError: A transform runs now.
    """
    if in_transform():
        raise ConfigError(
            f"{what} is computed inside torch.func.grad, vmap or another of torch's function "
            f"transforms, which see what one rank does only. Leave the layer out of the plan, "
            f"use torch.autograd.grad, or use strategy='zero2'."
        )
