"""The modules' own counts of heads, which are smaller on each rank.

    class Attention:                      full     2 ranks
        num_heads                             8          4
        num_key_value_heads                   1          1      shared: each rank computes its own
        num_key_value_groups                  8          4
        q_proj, k_proj, v_proj, o_proj        split by a plan

An attention module folds its projections' results by such attributes. They are set to a rank's
counts, and back to the full ones in the end.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.layers import is_transposed
from lightning_shard.tensor_parallel.plan import PlannedLayer
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
        self._before: list[tuple[nn.Module, str, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute, if the module has it."""
        if name in module.__dict__:
            self._before.append((module, name, module.__dict__[name]))
            setattr(module, name, value)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose attributes are set."""
        return [module for module, *_ in self._before]

    @property
    def names(self) -> list[tuple[nn.Module, str]]:
        """The modules and the names of the attributes that are set."""
        return [(module, name) for module, name, _ in self._before]

    def restore_copy(self, made: nn.Module, of: nn.Module) -> None:
        """Set the attributes of a copy to the original values of its original's."""
        for module, name, value in reversed(self._before):
            if module is of:
                setattr(made, name, value)

    def restore(self) -> None:
        """Set all attributes to their original values."""
        while self._before:
            setattr(*self._before.pop())


def count_heads(
    model: nn.Module, layers: Sequence[PlannedLayer], num_ranks: int, attributes: Attributes
) -> dict[nn.Module, list[PlannedLayer]]:
    """Tell the modules whose projections are split how many heads there are on each rank.

    Returns:
        These modules, with their layers that are split.

    Raises:
        ConfigError: The ranks cannot share the heads.
    """
    parents = {
        f"{path}.{name}".lstrip("."): parent
        for path, parent in model.named_modules()
        for name, _ in parent.named_children()
    }
    split: dict[nn.Module, list[PlannedLayer]] = {}
    for layer in layers:
        linear = wrapped_linear(layer.module) or layer.module
        if is_transposed(linear) and layer.style.form == "colwise":
            _narrow(linear, ("nf",), num_ranks, attributes)
        if not layer.style.full_output or not layer.style.full_input:
            split.setdefault(parents[layer.name], []).append(layer)
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
        fitting = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"{layer.name} has {num_heads} heads of {width}, which {num_ranks} ranks cannot share; "
            f"expected a tensor_parallel_size of {', '.join(fitting)}, or, of keys and values, the "
            f"style 'shared_heads({num_heads})' with a multiple of {num_heads} ranks."
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
            fitting = [str(n) for n in range(1, width + 1) if width % n == 0]
            raise ConfigError(
                f"{type(module).__name__}.{name} is {width}, which {num_ranks} ranks cannot "
                f"share; expected a tensor_parallel_size of {', '.join(fitting)}."
            )
        attributes.set(module, name, width // num_ranks)


def _has_heads(parent: nn.Module, layers: Sequence[PlannedLayer], layer: PlannedLayer) -> bool:
    """Whether the heads that a layer's parent counts are split with the layer.

    If the plan does not say it, they are, unless a projection of the parent's is full whose name
    is one for query, key and value.
    """
    if layer.has_heads is not None:
        return layer.has_heads
    split = {one.module for one in layers}
    return not any(
        isinstance(wrapped_linear(module) or module, nn.Linear)
        and module not in split
        and _QUERIES.search(name)
        for name, module in parent.named_children()
    )
