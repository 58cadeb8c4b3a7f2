"""Changes to a copy of the user's module, one at a time.

Most leave out something that is known to depend on how the samples are spread over ranks: a
difference may vanish with it. Others make a big model small.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_shard.core.modules import num_parameters
from lightning_shard.data_parallel.torch_private import (
    forget_backward_hooks,
    forget_gradient_hooks,
    has_backward_hooks,
    has_gradient_hooks,
)
from lightning_shard.environments.launchers._copy import copy_with_functions
from lightning_shard.errors import ConfigError

Change = Callable[[pl.LightningModule], None]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
)


def dropouts_of(module: nn.Module) -> list[str]:
    """Return the names of the modules that drop elements."""
    return [
        name for name, one in module.named_modules() if isinstance(one, _DROPOUTS) and one.p > 0
    ]


def batch_norms_of(module: nn.Module) -> list[str]:
    """Return the names of the batch norms that train with their batch's statistics."""
    return [
        name
        for name, one in module.named_modules()
        if isinstance(one, _BATCH_NORMS) and one.training
    ]


def without_dropout(module: pl.LightningModule) -> None:
    """Let nothing be dropped: by layers, and by numbers that others drop with as a function."""
    for one in module.modules():
        if isinstance(one, _DROPOUTS):
            one.p = 0.0
        for holder in (one, getattr(one, "config", None)):
            for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
                if "drop" in name and isinstance(value, float) and 0.0 < value < 1.0:
                    setattr(holder, name, 0.0)


def still(module: pl.LightningModule) -> None:
    """Let every module but batch norms compute as in evaluation."""
    for one in module.modules():
        one.training = isinstance(one, _BATCH_NORMS) and one.training


def with_fixed_statistics(module: pl.LightningModule) -> None:
    """Let batch norms use fixed statistics."""
    for one in module.modules():
        if isinstance(one, _BATCH_NORMS):
            one.training = False
            if one.running_mean is None:
                width = one.num_features
                one.running_mean, one.running_var = torch.zeros(width), torch.ones(width)


def without_parameter_hooks(module: pl.LightningModule) -> None:
    """Take the hooks off the parameters."""
    for param in module.parameters():
        forget_gradient_hooks(param)


def hooked_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that have hooks of the user's."""
    return [name for name, param in module.named_parameters() if has_gradient_hooks(param)]


def modules_with_backward_hooks(module: nn.Module) -> list[str]:
    """Return the names of the modules that have backward hooks of the user's."""
    return [name for name, one in module.named_modules() if has_backward_hooks(one)]


def without_backward_hooks(module: pl.LightningModule) -> None:
    """Take the backward hooks off the modules."""
    for one in module.modules():
        forget_backward_hooks(one)


def with_gathered_gradients(module: pl.LightningModule) -> None:
    """Let `all_gather` pass gradients back."""
    gather = module.all_gather

    def gathering(data: Any, group: Any = None, sync_grads: bool = True) -> Any:
        return gather(data, group, True)

    module.all_gather = gathering  # type: ignore[method-assign]


def overridden_hooks(module: pl.LightningModule) -> list[str]:
    """Return the names of Lightning's hooks that the user's module has."""
    return [name for name in _HOOKS if is_overridden(name, module, pl.LightningModule)]


def without_hook(name: str) -> Change:
    """Return a change that makes a hook Lightning's own."""

    def change(module: pl.LightningModule) -> None:
        setattr(module, name, partial(getattr(pl.LightningModule, name), module))

    return change


def without_updates(module: pl.LightningModule) -> None:
    """Let optimizers compute gradients and leave the weights."""

    def step(epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        closure()

    module.optimizer_step = step  # type: ignore[assignment,method-assign]


def without_callback(at: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's options without one of its callbacks."""
    callbacks: list[Callback] = list(options.get("callbacks") or ())
    return {**options, "callbacks": callbacks[:at] + callbacks[at + 1 :]}


def shared_storages(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of different parameters or buffers that lie in the same memory."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, value in _tensors_of(module).items():
        if value.numel() == 0:
            continue
        before, tensor = seen.setdefault(value.untyped_storage().data_ptr(), (name, value))
        if tensor is not value:
            yield before, name


def share_storages(module: nn.Module, original: nn.Module) -> None:
    """Let a copy's tensors share memory where the original's do: copies and formats undo it."""
    own, given = _tensors_of(module), _tensors_of(original)
    for one, two in shared_storages(original):
        if given[one].numel() == given[two].numel():
            own[two].data = own[one].data.as_strided(given[two].size(), given[two].stride())


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Big models made small enough for a proof.
#
# A wide one is made anew from its own configuration, with widths divided:
#
#     Hugging Face     each network of a configuration, from one of fewer heads and features
#     Lightning        the module itself, from what `save_hyperparameters` has kept
#
# What is made of a width elsewhere (a head beside the network) stays, and the step then fails,
# which the verdict tells. Lists of repeated blocks are shortened: blocks of one list compute alike,
# so what goes wrong in a hundred goes wrong in two.

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
    before = num_parameters(module)
    if networks:
        made: pl.LightningModule = copy_with_functions(module, {}, [module], ())
        for path, network in networks:
            _put(made, path, _narrow_network(network, factor))
    else:
        made = _narrow_module(module, factor)
    after = num_parameters(made)
    if after >= before:
        raise ConfigError(
            f"narrow={factor} found no width in {type(module).__name__}: neither a network with a "
            f"Hugging Face configuration, nor an argument such as width=, hidden_size= or d_model= "
            f"that save_hyperparameters() has kept. Make the model narrow where it is made."
        )
    return made, f"the model was made narrow, from {before:,} to {after:,} parameters"


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
