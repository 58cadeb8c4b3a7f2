"""Hugging Face's attention functions with kernels of their own, such as `flash_attention_2`.

    query (B, H, S/W, D) ──all-to-all──> (B, H/W, S, D) ──the function──> (B, S, H/W, D) ──> back

What is registered under `attn_implementation` is called with plain tensors: this rank's heads of
the full sequence, with masks, windows and packed documents as they are. So is FlexAttention with
block masks. Of tensors that are not cut, the functions are called as ever.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.context_parallel.attention import own_heads_of_mask, repeated_heads
from lightning_shard.context_parallel.crossings import exchange, exchange_together
from lightning_shard.context_parallel.sequence_part import SequencePart, part_of
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.tensor_parallel.randomness import drawn_apart

_REGISTRY = "transformers.modeling_utils"
_IN_OPERATIONS = ("sdpa", "paged|eager")  # which have rules
_OF_HEADS = ("s_aux",)  # a number for each head: sinks


class AttentionFunctions:
    """Lets the registered attention functions be called with parts, until `restore`."""

    def __init__(self) -> None:
        module = sys.modules.get(_REGISTRY)
        self._registry: Any = getattr(module, "AttentionInterface", None)
        self._taken: list[str] = []
        if self._registry is None:
            return
        for name, function in dict(self._registry()).items():
            if name not in _IN_OPERATIONS:
                known = isinstance(function, _OnParts)
                taken = function if known else _OnParts(name, function)
                taken.num_users += 1
                self._registry.register(name, taken)
                self._taken.append(name)

    def restore(self) -> None:
        """Register the functions themselves again, once nobody calls them with parts."""
        for name in self._taken:
            taken = self._registry()[name]
            if isinstance(taken, _OnParts):
                taken.num_users -= 1
                if not taken.num_users:
                    self._registry.register(name, taken.function)
        self._taken = []


class _OnParts:
    """An attention function that may be given parts."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self.num_users = 0

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        parts = [part_of(one) for one in (query, key, value)]
        part = parts[0]
        if all(one is None for one in parts):
            return self.function(module, query, key, value, attention_mask, **options)
        if part is None or any(
            one is None or not one.is_like(part) or one.width != part.width for one in parts
        ):
            whole = full_tensor((query, key, value))
            return self.function(module, *whole, attention_mask, **options)
        self._check(part, key, attention_mask)
        q, k, v = _own_heads([one for one in parts if one is not None], part)
        drawn: AbstractContextManager[None] = nullcontext()
        if options.get("dropout") and module.training:
            drawn = drawn_apart(part.group, part.local.device)
        mask = own_heads_of_mask(attention_mask, part)
        with drawn:
            mixed, *shown = self.function(module, q, k, v, mask, **_of_heads(options, part))
        return part.widen(_own_rows(mixed, part), 1), *(_shown(one, part) for one in shown)

    def _check(self, part: SequencePart, key: Tensor, mask: Any) -> None:
        num_ranks, heads = part.group.size, part.local.shape[1]
        if part.place != 2 or part.num_blocks > 1 or heads % num_ranks or heads % key.shape[1]:
            raise ConfigError(
                f"Rank {part.group.rank}: attn_implementation={self.name!r} attends with whole "
                f"heads, but {num_ranks} context-parallel ranks cannot share out {heads} of them; "
                f"expected a divisor of {heads}. Use attn_implementation='sdpa', whose keys come "
                f"by in a ring, or a context_parallel_size that divides the heads."
            )
        num_of_mask = getattr(mask, "shape", (1, 1))[1] if not isinstance(mask, Tensor) else 1
        if num_of_mask != 1:
            raise ConfigError(
                f"Rank {part.group.rank}: attn_implementation={self.name!r} is given a block mask "
                f"that differs by head, of shape {tuple(mask.shape)}; expected one of all heads, "
                f"as create_block_mask makes with H=None. Use attn_implementation='sdpa'."
            )


def _own_heads(parts: Sequence[SequencePart], like: SequencePart) -> list[Tensor]:
    """Return this rank's heads of the full sequence, of queries, keys and values."""
    num_heads, group = like.local.shape[1], like.group
    repeated = [repeated_heads(one.local, num_heads, group.size) for one in parts]
    received = exchange_together(repeated, 1, 2, group)
    return [part.without_padding(one, 2) for part, one in zip(parts, received, strict=True)]


def _own_rows(mixed: Tensor, part: SequencePart) -> Tensor:
    """Return all heads of this rank's positions, (B, S/W, H, D) of (B, S, H/W, D)."""
    padded = functional.pad(mixed, (0, 0, 0, 0, 0, part.padding)) if part.padding else mixed
    return exchange(padded, 1, 2, part.group)


def _of_heads(options: Mapping[str, Any], part: SequencePart) -> dict[str, Any]:
    """Return options with this rank's share of those that have a number for each head."""
    own = {
        name: options[name].chunk(part.group.size)[part.group.rank]
        for name in _OF_HEADS
        if isinstance(options.get(name), Tensor)
    }
    return {**options, **own}


def _shown(value: Any, part: SequencePart) -> Any:
    """Return what a function shows of its heads, weights (B, H/W, S, S) say, for all of them."""
    if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[2] != part.width:
        return value
    rows = torch.cat([value, value[:, :, -part.padding :]], 2) if part.padding else value
    return part.widen(exchange(rows, 2, 1, part.group), 2)
