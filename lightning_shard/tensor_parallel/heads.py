"""Attentions of which each rank has some heads: their counts, and the keys that they are given.

    class Attention:                      full     2 ranks
        num_heads                             8          4
        num_key_value_heads                   1          1      shared: each rank computes its own
        num_key_value_groups                  8          4

An attention module folds its projections' results by such attributes, which are set to a rank's
counts. Keys and values that user code brings, such as a learned prefix (B, heads, P, width), are
cut for it while it runs; what the attention has put there itself is of this rank's heads already.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.units.unsharding import TracedHook
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.layers import is_split, is_transposed
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.regions import PASSES_ON, copy_to_region, split_to_region
from lightning_shard.tensor_parallel.wrappers import linear_sizes, wrapped_linear

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
ALL_HEADS = (*HEADS, *_KEY_HEADS)
_WIDTHS = (*ALL_HEADS, "all_head_size", "split_size", "inner_dim")
_QUERIES = re.compile(r"^(w?q|.*query|.*q_?(proj|lin)|to_q|.*qkv|c_attn|in_proj)$", re.IGNORECASE)

_OF_HEADS = re.compile(r"^(w?[qkv]|query|key|value|[qkv]_?(proj|lin)|to_[qkv])$", re.IGNORECASE)


class Attributes:
    """Attributes of modules that have other values for a time."""

    def __init__(self) -> None:
        self._before: dict[nn.Module, dict[str, Any]] = {}

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute, if the module has it."""
        if name in module.__dict__:
            self._before.setdefault(module, {}).setdefault(name, module.__dict__[name])
            setattr(module, name, value)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose attributes are set."""
        return list(self._before)

    def names_of(self, module: nn.Module) -> Iterable[str]:
        """Return the names of the attributes of a module that are set."""
        return self._before.get(module, ())

    def restore_copy(self, made: nn.Module, of: nn.Module) -> None:
        """Set the attributes of a copy to the original values of its original's."""
        for name, value in self._before.get(of, {}).items():
            setattr(made, name, value)

    def restore(self) -> None:
        """Set all attributes to their original values."""
        for module, values in self._before.items():
            for name, value in values.items():
                setattr(module, name, value)
        self._before.clear()


def count_heads(
    model: nn.Module, layers: Sequence[PlannedLayer], num_ranks: int, attributes: Attributes
) -> dict[nn.Module, list[PlannedLayer]]:
    """Tell the modules whose projections are split how many heads there are on each rank."""
    split: dict[nn.Module, list[PlannedLayer]] = {}
    for layer in layers:
        linear = wrapped_linear(layer.module) or layer.module
        if is_transposed(linear) and layer.style.form == "colwise":
            _narrow(linear, ("nf",), num_ranks, attributes)
        if not layer.style.full_output or not layer.style.full_input:
            split.setdefault(model.get_submodule(layer.parent), []).append(layer)
    told = {
        parent: own
        for parent, own in split.items()
        if any(_has_heads(parent, own, layer) for layer in own)
    }
    for parent, own in told.items():
        shared = [one.style.num_blocks for one in own if one.style.form == "shared"]
        if shared:
            _share_heads(parent, shared[0], num_ranks, attributes)
        for layer in own:
            _check_whole_heads(parent, layer, num_ranks)
        names = [name for name in _WIDTHS if not shared or name not in _KEY_HEADS]
        _narrow(parent, names, num_ranks, attributes)
    return told


def _check_whole_heads(parent: nn.Module, layer: PlannedLayer, num_ranks: int) -> None:
    """Raise if a projection would be cut within a head."""
    width = parent.__dict__.get("head_dim")
    name = layer.name.rpartition(".")[2]
    linear = wrapped_linear(layer.module) or layer.module
    is_cut = isinstance(linear, nn.Linear) and layer.style.form == "colwise"
    if not isinstance(width, int) or not is_cut or not _OF_HEADS.search(name):
        return
    num_heads = linear_sizes(layer.module)[1] // width
    if num_heads % num_ranks:
        raise ConfigError(
            f"{layer.name} has {num_heads} heads of {width}, which {num_ranks} ranks cannot share; "
            f"expected a tensor_parallel_size of {_divisors(num_heads)}, or, of keys and values, "
            f"the style 'shared_heads({num_heads})' with a multiple of {num_heads} ranks."
        )


def _share_heads(parent: nn.Module, num_heads: int, num_ranks: int, attributes: Attributes) -> None:
    """Leave each rank one head of keys and values."""
    for name in _KEY_HEADS:
        attributes.set(parent, name, 1)
    if isinstance(groups := parent.__dict__.get("num_key_value_groups"), int):
        attributes.set(parent, "num_key_value_groups", groups * num_heads // num_ranks)


def _narrow(
    module: nn.Module, names: Sequence[str], num_ranks: int, attributes: Attributes
) -> None:
    for name in names:
        width = module.__dict__.get(name)
        if not isinstance(width, int) or isinstance(width, bool):
            continue
        if width % num_ranks:
            raise ConfigError(
                f"{type(module).__name__}.{name} is {width}, which {num_ranks} ranks cannot "
                f"share; expected a tensor_parallel_size of {_divisors(width)}."
            )
        attributes.set(module, name, width // num_ranks)


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


def _has_heads(parent: nn.Module, layers: Sequence[PlannedLayer], layer: PlannedLayer) -> bool:
    """Whether the heads that a layer's parent counts are split with the layer."""
    # If the plan does not say it, they are, unless a projection for query, key and value is full.
    if layer.has_heads is not None:
        return layer.has_heads
    split = {one.module for one in layers}
    return not any(
        isinstance(wrapped_linear(module) or module, nn.Linear)
        and module not in split
        and _QUERIES.search(name)
        for name, module in parent.named_children()
    )


_OWN = "_lightning_shard_own_heads"  # set on tensors that an attention has left where it runs
_HOLDS_KEYS = re.compile(r"past|cache|present|prefix|prompt|mem|kv|key|value", re.IGNORECASE)
_PLAIN = (str, bytes, int, float, type(None), nn.Module)
_DEPTH = 5  # argument, cache of two kinds, its list of layers, the layer, its keys
_Cut = tuple[Any, Any, Any, Any]  # container, key, what is there, what was there


@dataclass(eq=False)
class GivenHeads:
    """Cuts what one attention is given to this rank's heads, while it runs."""

    group: Collectives
    widths: Mapping[int, int]
    _running: list[list[_Cut]] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call with this rank's heads."""
        cuts: list[_Cut] = []
        self._running.append(cuts)
        if torch.compiler.is_compiling() or not any(map(is_split, module.modules())):
            return None
        names = [*inspect.signature(module.forward).parameters]
        own = [self._own_of(name, one, cuts) for name, one in zip(names, args, strict=False)]
        return (*own, *args[len(own) :]), {
            name: self._own_of(name, kwargs[name], cuts) for name in kwargs
        }

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Note what is the attention's own, and put back what it has left as it was given."""
        if 1 in self.widths.values() and torch.is_grad_enabled():
            _visit((args, kwargs, result), _note_own, [])
        for container, key, cut, given in self._running.pop():
            there = dict(enumerate(container)) if isinstance(container, list) else container
            if there.get(key) is cut:  # else the attention has put something else there, or nothing
                container[key] = given

    def _own_of(self, name: str, value: Any, cuts: list[_Cut]) -> Any:
        return _visit(value, self._own, cuts) if _HOLDS_KEYS.search(name) else value

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this rank's heads of (B, heads, P, width) or (B, P, heads, width)."""
        if tensor.ndim != 4 or hasattr(tensor, PASSES_ON) or _OWN in vars(tensor):
            return tensor
        for dim in (1, 2):
            num_heads, size = tensor.shape[dim], self.group.size
            shared = self.widths.get(num_heads * tensor.shape[3])
            if shared == 0 and num_heads % size == 0:
                return split_to_region(tensor, dim, self.group)
            if shared and shared == num_heads:
                first = self.group.rank * shared // size
                return copy_to_region(tensor, self.group).narrow(dim, first, 1)
        return tensor


def _note_own(tensor: Tensor) -> Tensor:
    vars(tensor)[_OWN] = True
    return tensor


def _visit(value: Any, see: Callable[[Tensor], Tensor], cuts: list[_Cut], depth: int = 0) -> Any:
    """Return a value with what `see` makes of each tensor; containers but tuples are changed."""
    if isinstance(value, Tensor):
        return see(value)
    if depth > _DEPTH or isinstance(value, (*_PLAIN, type)):
        return value
    if isinstance(value, tuple):
        made = [_visit(one, see, cuts, depth + 1) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    held = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", {})
    for key, one in [*(enumerate(held) if isinstance(held, list) else held.items())]:
        own = _visit(one, see, cuts, depth + 1)
        if own is not one and isinstance(own, (Tensor, tuple)):
            held[key] = own
            cuts.append((held, key, own, one))
    return value


def cut_given_heads(
    attention: nn.Module, layers: Sequence[PlannedLayer], group: Collectives
) -> Iterator[RemovableHandle]:
    """Let an attention be given keys and values of all heads; yield the hooks that see to it."""
    widths = {}
    for module, style in ((layer.module, layer.style) for layer in layers):
        if style.form == "shared":
            widths[linear_sizes(module)[1]] = style.num_blocks
        elif style.form == "colwise":
            widths[linear_sizes(module)[1] // style.num_blocks] = 0
    given = GivenHeads(group, widths)
    if widths and group.size > 1:
        before, after = TracedHook(given.before), TracedHook(given.after)
        yield attention.register_forward_pre_hook(before, with_kwargs=True)
        yield attention.register_forward_hook(after, with_kwargs=True, always_call=True)
