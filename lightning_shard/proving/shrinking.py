"""Makes a big model small enough for a proof: lists of repeated blocks are shortened.

Blocks of one list compute alike, so what goes wrong in a hundred goes wrong in two. A Hugging Face
configuration that counts the blocks is told of the new number.
"""

from collections.abc import Iterator

import lightning.pytorch as pl
from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.launchers._copy import copy_with_functions

_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)


def shrunk(module: pl.LightningModule, num_blocks: int) -> tuple[pl.LightningModule, str]:
    """Return a copy with at most so many blocks in each list, and what was done in words.

    Raises:
        ConfigError: The model has no longer list of repeated blocks.
    """
    small: pl.LightningModule = copy_with_functions(module, {}, [module], ())
    lists = list(_long_lists(small, num_blocks))
    if not lists:
        raise ConfigError(
            f"shrink={num_blocks} found no ModuleList or Sequential of more than {num_blocks} "
            f"modules of one class in {type(module).__name__}. Prove it in full, or give it fewer "
            f"layers where it is made."
        )
    told = []
    for name, blocks in lists:
        told.append(f"{name!r} from {len(blocks)} to {num_blocks}")
        _tell_configurations(small, len(blocks), num_blocks)
        del blocks[num_blocks:]
    return small, f"the model was shrunk: {', '.join(told)} blocks"


def _long_lists(
    module: nn.Module, num_blocks: int
) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, one in list(module.named_modules()):
        if isinstance(one, nn.ModuleList | nn.Sequential) and len(one) > num_blocks:
            has_params = any(True for _ in one.parameters())
            if has_params and len({type(child) for child in one}) == 1:
                yield name, one


def _tell_configurations(module: nn.Module, before: int, after: int) -> None:
    for one in module.modules():
        config = getattr(one, "config", None)
        for name in _COUNTS:
            if config is not None and getattr(config, name, None) == before:
                setattr(config, name, after)
