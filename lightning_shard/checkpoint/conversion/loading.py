"""Weights of Hugging Face, or of anybody, into a module: one tensor at a time.

    load_safetensors(self.model, "gpt2/")        a folder, with an index or without, or one file

A module is a plain one, before the fit, on the CPU, a GPU or "meta" (its parameters are made when
their values come); or a run's, in a hook, where each rank keeps its shard of the tensor at hand.
Where a module on meta is being built for a run, the file is read when the ranks make their shards.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.conversion.hugging_face_names import named_as
from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.checkpoint.conversion.unread import Unread, is_unread
from lightning_shard.checkpoint.misfits import dtype_misfit, misfit_error, shape_misfit
from lightning_shard.meta_start.recorder import read_at_start

_ADVICE = (
    "Pass the module that has these names, such as the model in a LightningModule; names that "
    "differ on purpose are left out with strict=False."
)


class Misses(NamedTuple):
    """Names that were not loaded, as `load_state_dict` tells them.

    Attributes:
        missing_keys: Names of the module that the file has no values for.
        unexpected_keys: Names of the file that the module does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(module: nn.Module, path: Any, *, strict: bool = True) -> Misses:
    """Load safetensors into a module, in the memory of one tensor; all is checked first.

    Call it before a fit, in `configure_model` or `setup`, or in a later hook: there each rank must
    call. Values are turned into the parameters' own formats. Parameters that are tied need one
    name of theirs in the file. A model of Hugging Face takes what its `from_pretrained` takes:
    names of its base model or of older versions, experts one by one. In `configure_model`, and
    inside `trainer.init_module`, parameters on meta stay there, and are read unit by unit when the
    ranks make their shards: by the first rank, or by each what it has a part of.

    Args:
        module: The module that has the file's names: of a LightningModule that wraps a model, the
            wrapped one.
        path: A file or a folder of safetensors, local or any path of fsspec's; also a `.pt`, a
            `.ckpt` or a sharded folder, for its weights.
        strict: Whether the names must be the module's.

    Returns:
        The names that were left out, which are none under `strict` but those of tied parameters,
        and those that a class of Hugging Face's does without.

    Raises:
        CheckpointError: Names, shapes or kinds of numbers do not fit, and nothing was loaded; or
            the file is damaged.
    """
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    source = open_source(path, weights_only=True)
    if source.folder is not None:
        source.folder.check_complete()
    named = named_as(module, own, source.weights)
    stored = named.tensors
    misses = _misses(own, stored)
    found = _name_misfits(own, stored, misses, named.may_lack) if strict else []
    found += _misfits(own, stored)
    if found:
        raise misfit_error(type(module).__name__, found, _ADVICE)
    for name, value in own.items():
        if is_unread(stored.get(name)):
            unread = stored[name]
            if not read_at_start(value, unread.read):
                _set(module, name, value, unread)
    return misses


def _misses(own: Mapping[str, Tensor], stored: Mapping[str, Any]) -> Misses:
    missing = [name for name in own if not is_unread(stored.get(name))]
    return Misses(missing, [name for name in stored if name not in own])


def _name_misfits(
    own: Mapping[str, Tensor], stored: Mapping[str, Any], misses: Misses, may_lack: set[str]
) -> list[str]:
    loaded = {id(value) for name, value in own.items() if is_unread(stored.get(name))}
    missing = [
        name for name in misses.missing_keys if id(own[name]) not in loaded and name not in may_lack
    ]
    return [
        *([f"Missing key(s): {_some(missing)}"] if missing else []),
        *(
            [f"Unexpected key(s): {_some(misses.unexpected_keys)}"]
            if misses.unexpected_keys
            else []
        ),
    ]


def _misfits(own: Mapping[str, Tensor], stored: Mapping[str, Any]) -> list[str]:
    found: list[str | None] = []
    for name, value in own.items():
        tensor: Unread | None = stored.get(name)
        if tensor is not None and is_unread(tensor):
            found.append(shape_misfit(repr(name), tensor.shape, value.shape))
            found.append(dtype_misfit(repr(name), tensor.dtype, value.dtype))
    return [one for one in found if one is not None]


def _set(module: nn.Module, name: str, value: Tensor, unread: Unread) -> None:
    """Give one parameter or buffer its value, through the module that has it."""
    tensor = unread.read()
    if value.is_meta and isinstance(value, nn.Parameter):  # all that share it get it
        made = nn.Parameter(tensor.to(value.dtype), value.requires_grad)
        torch.utils.swap_tensors(value, made)  # type: ignore[no-untyped-call]
        return
    prefix, _, leaf = name.rpartition(".")
    owner = module.get_submodule(prefix)
    owner.load_state_dict({leaf: tensor.to(value.dtype)}, strict=False, assign=value.is_meta)


def _some(names: list[str]) -> str:
    told = ", ".join(map(repr, names[:5]))
    return f"{told} and {len(names) - 5} more" if len(names) > 5 else told
