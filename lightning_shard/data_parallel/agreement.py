"""Before training: do all ranks hold the same model?"""

from itertools import zip_longest

from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError


def check_same_model(model: nn.Module, collectives: Collectives) -> None:
    """Compare names, shapes and formats of all parameters over the ranks; each must call.

    Raises:
        ConfigError: On every rank, with the first parameter that differs.
    """
    mine = [
        f"{name} {tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}"
        for name, param in model.named_parameters()
    ]
    everyone = collectives.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            expected, got = next(
                (a, b) for a, b in zip_longest(everyone[0], theirs, fillvalue="none") if a != b
            )
            raise ConfigError(
                f"Rank {collectives.rank}: the ranks hold different models. Rank {rank} has the "
                f"parameter [{got}] where rank 0 has [{expected}]. Build the model from the same "
                f"arguments on every rank."
            )
