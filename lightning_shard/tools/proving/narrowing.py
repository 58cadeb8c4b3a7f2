"""Makes a big model small enough for a proof.

A wide one is made anew from its own configuration, with widths divided:

    Hugging Face     each network of a configuration, from one of fewer heads and features
    Lightning        the module itself, from what `save_hyperparameters` has kept

A model is narrow in the places that its configuration knows. What is made of a width elsewhere
(a head beside the network) stays, and the step then fails, which the verdict tells.

Lists of repeated blocks are shortened. Blocks of one list compute alike, so what goes wrong in a
hundred goes wrong in two. A Hugging Face configuration that counts the blocks is told of the new
number.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_shard.environments.launchers._copy import copy_with_functions
from lightning_shard.errors import ConfigError

_WIDTHS = (
    "hidden_size",
    "hidden_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "embedding_size",
    "embed_dim",
    "word_embed_proj_dim",
    "d_model",
    "d_ff",
    "d_inner",
    "d_kv",
    "dim",
    "dim_feedforward",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "n_embd",
    "n_inner",
    "width",
    "q_lora_rank",
    "kv_lora_rank",
)
_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "nhead",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_OF_A_HEAD = ("d_kv",)  # a width of each head, kept where heads become fewer


def narrowed(module: pl.LightningModule, factor: int) -> tuple[pl.LightningModule, str]:
    """Return a copy whose widths are divided by a factor, and what was done in words."""
    networks = [] if factor == 1 else list(_configured(module))
    before = _numel(module)
    if networks:
        made: pl.LightningModule = copy_with_functions(module, {}, [module], ())
        for path, network in networks:
            _put(made, path, _narrow_network(network, factor))
    else:
        made = _narrow_module(module, factor)
    if _numel(made) >= before:
        raise ConfigError(
            f"narrow={factor} found no width in {type(module).__name__}: neither a network with a "
            f"Hugging Face configuration, nor an argument such as width=, hidden_size= or d_model= "
            f"that save_hyperparameters() has kept. Make the model narrow where it is made."
        )
    return made, f"the model was made narrow, from {before:,} to {_numel(made):,} parameters"


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _configured(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks that are made of a Hugging Face configuration, not those inside them."""
    for name, child in module.named_children():
        if hasattr(getattr(child, "config", None), "to_dict") and hasattr(child, "config_class"):
            yield name, child
        else:
            yield from ((f"{name}.{path}", one) for path, one in _configured(child))


def _put(module: nn.Module, path: str, network: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, network)


def _narrow_network(network: nn.Module, factor: int) -> nn.Module:
    config = copy.deepcopy(network.config)
    for one in _with_parts(config):
        for name, value in _narrow(vars(one), factor).items():
            setattr(one, name, value)
    made: nn.Module = type(network)(config)
    made.to(next(network.parameters()).dtype).train(network.training)
    trained = {name: param.requires_grad for name, param in network.named_parameters()}
    for name, param in made.named_parameters():
        param.requires_grad_(trained.get(name, True))
    return made


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it: of the text, of the images."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _with_parts(value)


def _narrow_module(module: pl.LightningModule, factor: int) -> pl.LightningModule:
    kept = dict(module.hparams)
    arguments = {**kept, **_narrow(kept, factor)}
    if arguments == kept:
        return module
    try:
        return type(module)(**arguments)
    except Exception as error:
        raise ConfigError(
            f"narrow={factor} could not make {type(module).__name__} with {arguments}: "
            f"{type(error).__name__}: {error}. Make the model narrow where it is made."
        ) from error


def _narrow(values: Mapping[str, Any], factor: int) -> dict[str, Any]:
    """Return those of the values that change: heads first, so that each stays as wide as it is."""
    heads = {name: values[name] for name in _HEADS if isinstance(values.get(name), int)}
    fewer = {name: number // factor for name, number in heads.items() if number % factor == 0}
    are_fewer = bool(heads) and all(name in fewer for name in heads)
    kept = _OF_A_HEAD if are_fewer else ()
    widths = {
        name: values[name]
        for name in _WIDTHS
        if isinstance(values.get(name), int) and name not in kept
    }
    for name, width in widths.items():
        if width % factor:
            raise ConfigError(
                f"narrow={factor} does not divide {name}={width}, expected a number that divides "
                f"every width."
            )
    found = {name: width // factor for name, width in widths.items()}
    if are_fewer:
        return found | fewer
    of_a_head = values.get("head_dim")
    if isinstance(of_a_head, int) and of_a_head % factor == 0:
        found["head_dim"] = of_a_head // factor
    return found


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
    """Return a copy with at most so many blocks in each list, and what was done in words."""
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
