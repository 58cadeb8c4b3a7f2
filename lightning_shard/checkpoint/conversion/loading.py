"""Weights of Hugging Face, or of anybody, into a module: one tensor at a time.

The module of a Hugging Face model finds tensors under its names, as its `from_pretrained` gives
them:

    h.0.ln_1.weight                    transformer.h.0.ln_1.weight      the prefix of its base model
    LayerNorm.gamma                    LayerNorm.weight                 names of older versions
    experts.0.w1, experts.0.w3, ...    experts.gate_up_proj             put together when it is read
    h.0.attn.bias                      left out                         what its class ignores

Private names of transformers, which is not imported here: `_keys_to_ignore_on_load_unexpected` and
`_keys_to_ignore_on_load_missing`. The rules themselves are its `conversion_mapping` and
`core_model_loading`; versions without them (before 5) have the prefix alone.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.checkpoint.misfits import dtype_misfits, misfit_error, shape_misfits
from lightning_shard.checkpoint.unread import MadeWhenRead, Unread, is_unread
from lightning_shard.data_parallel.deferred_init.recorder import read_at_start
from lightning_shard.data_parallel.torch_private import without_function_modes
from lightning_shard.errors import CheckpointError, some_of

_BASE = ("transformers.modeling_utils", "PreTrainedModel")
_MOVED = ("rotary_emb.inv_freq", "position_ids")  # buffers that files of older versions have
_ADVICE = (
    "Pass the module that has these names, such as the model in a LightningModule; names that "
    "differ on purpose are left out with strict=False."
)


def named_as(
    module: nn.Module, own: Iterable[str], stored: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return a file's tensors under a module's names, and the names that its class does without."""
    names = set(own)
    if not _is_hugging_face(module) or (names <= stored.keys() and len(names) == len(stored)):
        return dict(stored), set()
    found = _renamed(module, names, stored)
    unexpected = _patterns(module, "_keys_to_ignore_on_load_unexpected")
    buffers = [name for name, _ in module.named_buffers()]
    unexpected += [
        rf"(^|\.){re.escape(leaf)}$"
        for leaf in _MOVED
        if any(name.endswith(leaf) for name in buffers)
    ]
    missing = _patterns(module, "_keys_to_ignore_on_load_missing")
    found = {
        name: one for name, one in found.items() if name in names or not _any(unexpected, name)
    }
    return found, {name for name in names if _any(missing, name)}


def _renamed(module: nn.Module, names: set[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    rename, renamings, converters, order = _rules(module)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = dict.fromkeys(names, True)
    prefix = str(getattr(module, "base_model_prefix", ""))
    found: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in sorted(stored, key=order):
        renamed, pattern = rename(name, renamings, converters, prefix, known)
        if renamed not in names and name in names:
            renamed, pattern = name, None
        if pattern is None or not is_unread(stored[name]):
            found[renamed] = stored[name]
        else:
            parts[renamed].append((name, pattern))
    for first, sources in parts.items():
        together = _Together(
            first,
            by_pattern[sources[0][1]],
            [(name, pattern, stored[name]) for name, pattern in sources],
            module,
        )
        found |= together.tensors()
    return found


@dataclass(frozen=True)
class _Together:
    """Tensors of a file, each with its rule's pattern, that a model has as one or as others."""

    first: str
    rule: Any
    sources: list[tuple[str, str, Unread]]
    module: nn.Module

    def tensors(self) -> dict[str, Unread]:
        """Return what they become, by the model's names."""
        made = self.made(lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
        return {
            name: MadeWhenRead(one.shape, one.dtype, partial(self._read, name))
            for name, one in made.items()
        }

    def _read(self, name: str) -> Tensor:
        return self.made(lambda one: one.read())[name].contiguous()

    def made(self, read: Callable[[Unread], Tensor]) -> dict[str, Tensor]:
        """Put them together, each as `read` gives it."""
        rule = copy.deepcopy(self.rule)
        for name, pattern, tensor in self.sources:
            rule.add_tensor(self.first, name, pattern, lambda tensor=tensor: read(tensor))
        try:
            with without_function_modes(), torch.no_grad():
                made = rule.convert(
                    self.first, model=self.module, config=getattr(self.module, "config", None)
                )
        except Exception as error:
            raise CheckpointError(
                f"{self.first!r} of {type(self.module).__name__} cannot be made of "
                f"{', '.join(repr(name) for name, *_ in self.sources[:4])} as transformers says "
                f"({type(error).__name__}: {error}); expected a folder that its from_pretrained "
                f"reads. Save the model with save_pretrained of the installed version first."
            ) from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _rules(module: nn.Module) -> tuple[Any, list[Any], list[Any], Any]:
    """Return how names become others, the rules for names and tensors, and the order of names."""
    try:
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping")
        rules = mapping.get_model_conversion_mapping(module)
        return (
            loading.rename_source_key,
            [one for one in rules if isinstance(one, loading.WeightRenaming)],
            [one for one in rules if isinstance(one, loading.WeightConverter)],
            loading.dot_natural_key,
        )
    except (ImportError, AttributeError):
        return _with_prefix, [], [], str


def _with_prefix(
    name: str, renamings: Any, converters: Any, prefix: str, known: Mapping[str, bool]
) -> tuple[str, None]:
    """Add or take away the name of the base model."""
    if name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in known:
        return name.removeprefix(f"{prefix}."), None
    return (f"{prefix}.{name}" if f"{prefix}.{name}" in known else name), None


def _is_hugging_face(module: nn.Module) -> bool:
    return any((kind.__module__, kind.__name__) == _BASE for kind in type(module).__mro__)


def _patterns(module: nn.Module, attribute: str) -> list[str]:
    return list(getattr(module, attribute, None) or ())


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


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
    stored, may_lack = named_as(module, own, source.weights)
    known = {name: stored[name] for name in own if is_unread(stored.get(name))}
    missing = [name for name in own if name not in known]
    misses = Misses(missing, [name for name in stored if name not in own])
    found = _name_misfits(own, known, misses, may_lack) if strict else []
    found += [
        misfit
        for name, one in known.items()
        for misfit in (  # in this file, to which a parameter looks full in a run's hook
            *shape_misfits(repr(name), one.shape, own[name].shape),
            *dtype_misfits(repr(name), one.dtype, own[name].dtype),
        )
    ]
    if found:
        raise misfit_error(type(module).__name__, found, _ADVICE)
    for name, unread in known.items():
        if not read_at_start(own[name], unread.read):
            _set(module, name, own[name], unread)
    return misses


def _name_misfits(
    own: Mapping[str, Tensor], known: Iterable[str], misses: Misses, may_lack: set[str]
) -> list[str]:
    loaded = {id(own[name]) for name in known}
    missing = [
        name for name in misses.missing_keys if id(own[name]) not in loaded and name not in may_lack
    ]
    told = {"Missing": missing, "Unexpected": misses.unexpected_keys}
    return [f"{what} key(s): {some_of(names, 5)}" for what, names in told.items() if names]


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
