"""Cutting the sequence where a model's repeated blocks begin, and joining it where they end.

    embedding ──> x ──cut──> block 0 ──> block 1 ──> ... ──> block n ──> norm, head, cross entropy
                  (B, S, E)     (B, S / W, E) on each rank        (B, S / W, V)

A block is given its other arguments as they are: masks, positions and rotary tables stay full. In a
training step the last block's result stays in parts until an operation needs all of it. Where W
does not divide the positions, the last rank has copies of the last one in their place.

A trial tells whether a block computes the same of a sequence in parts, on copies of its first
arguments, in evaluation mode so that nothing is dropped; it leaves the block as it was. What
Hugging Face registers under `attn_implementation` is called with this rank's heads of the full
sequence.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.attention import own_heads, own_heads_of_mask
from lightning_shard.context_parallel.compiled import CompiledModules
from lightning_shard.context_parallel.crossings import cut_sequence, exchange
from lightning_shard.context_parallel.sequence_part import (
    FullSequences,
    SequencePart,
    padded,
    part_of,
)
from lightning_shard.core.placeholders import stands_in
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.data_parallel.recompute.recomputation import own_forward
from lightning_shard.data_parallel.units.units import named_blocks
from lightning_shard.data_parallel.units.unsharding import TracedHook
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    full_tensor,
    wrapped,
)
from lightning_shard.tensor_parallel.randomness import drawn_apart
from lightning_shard.tensor_parallel.trial import (
    Arguments,
    Called,
    as_it_was,
    explained,
    in_double,
    refuse_difference,
)

_REGISTRY = "transformers.modeling_utils"
_IN_OPERATIONS = ("sdpa", "paged|eager")  # which have rules
_OF_HEADS = ("s_aux",)  # a number for each head: sinks
Cut = Callable[[tuple[Any, ...], dict[str, Any]], Arguments | None]


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
        q, k, v = own_heads([one for one in parts if one is not None])
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


def try_block(
    name: str, block: nn.Module, arguments: Arguments, cut: Cut, group: Collectives
) -> None:
    """Call a block with full sequences and with parts, and compare; each rank must call."""
    with having(asker, Asker.ENGINE):
        trained = {name: one for name, one in block.named_parameters() if one.requires_grad}
    forward = own_forward(block)

    def in_full(given: Arguments) -> Any:
        return forward(*given[0], **given[1])

    def in_parts(given: Arguments) -> Any:
        args, kwargs = cut(*given) or given
        return forward(*args, **kwargs)

    def compared(double: bool) -> tuple[Called, Called]:
        with in_double(block, double=double) as copied:
            own = [*map(copied, trained.values())]
            with as_it_was(block):
                full = Called(in_full, arguments, own, double=double)
            with as_it_was(block), explained(partial(_fails_in_parts, name, block, group)):
                parts = Called(in_parts, arguments, own, double=double)
        for grad in parts.of_params:  # the mean over the ranks, as the engine takes it
            group.all_reduce(grad)
            grad.div_(group.size)
        return full, parts

    refuse_difference(group, compared, [*trained], partial(_differs_in_parts, name, block, group))


def _differs_in_parts(name: str, block: nn.Module, group: Collectives, found: str) -> str:
    return (
        f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) computes something else "
        f"of a sequence in {group.size} parts than of the full one: {found}. Expected equal "
        f"results, so nothing was trained. Use strategy='zero3' with "
        f"activation_checkpointing='full', or tensor_parallel with sequence_parallel=True; please "
        f"report the block's forward."
    )


def _fails_in_parts(name: str, block: nn.Module, group: Collectives, error: str) -> str:
    return (
        f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) runs with the full "
        f"sequence, but not with a sequence in {group.size} parts ({error}); expected operations "
        f"of torch that can be called with a subclass of Tensor. Use scaled_dot_product_attention "
        f"for attention, or strategy='zero3' with activation_checkpointing='full'."
    )


class CutBlocks:
    """Cuts the hidden states of a model's blocks until `restore`.

    Args:
        model: The model, whose blocks are found.
        group: Group of the W ranks that share each sequence.
        joins_each: Whether each block gives full hidden states, as where stages send them.
        tries: Whether the first call of each kind of block is tried before it is believed.

    Attributes:
        num_cut: Number of calls that were given hidden states so far.
        in_full: Knows which operations needed the full sequence.
    """

    def __init__(
        self, model: nn.Module, group: Collectives, *, joins_each: bool = False, tries: bool = True
    ) -> None:
        self._group, self._tries = group, tries
        self._warned = False
        self._tried: set[tuple[Hashable, bool]] = set()
        self.in_full = FullSequences(group.size)
        self._handles: list[RemovableHandle] = []
        self.num_cut = 0
        self.blocks = dict(named_blocks(model, None))
        self._kinds = {name: _kind(block) for name, block in self.blocks.items()}
        _check(model, self.blocks)
        self._compiled = CompiledModules(model, self.blocks, group)
        self._functions = AttentionFunctions()
        last = {name.rpartition(".")[0]: name for name in self.blocks}
        end = next(reversed(last.values()), None)
        for name, block in self.blocks.items():
            enter = TracedHook(partial(self._entered, name, sequence_dim(block)))
            self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            joins = joins_each or name in last.values()
            leave = TracedHook(partial(self._left, joins, name == end and not joins_each))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        self._compiled.begin()

    def check_cut(self, model: nn.Module) -> None:
        """Refuse to train where no block was called with a tensor of shape (B, S, E)."""
        if not self.num_cut:
            first = next(iter(self.blocks))
            raise ConfigError(
                f"Rank {self._group.rank}: none of the {len(self.blocks)} blocks of "
                f"{type(model).__name__}, such as {first!r} ({type(self.blocks[first]).__name__}), "
                f"was given hidden states of shape (batch, positions, features) in a training "
                f"step, so nothing is cut for the {self._group.size} context-parallel ranks; "
                f"expected blocks of a transformer. Use strategy='zero2' or 'zero3'."
            )

    def step_done(self) -> None:
        """Let what was watched in a step run compiled in later ones, where blocks are compiled."""
        self._compiled.share_out()

    def restore(self) -> None:
        """Let blocks be called with full sequences again."""
        self._compiled.restore()
        self._functions.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entered(
        self, name: str, dim: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Return a block's arguments with the hidden states cut; None to leave them."""
        hidden = _hidden_states(args, kwargs)
        if hidden is None or stands_in(block, (args, kwargs)):
            return None
        trial = self._kinds[name], torch.is_grad_enabled()
        self.in_full.block = name
        if self._tries and trial not in self._tried and hidden.shape[dim] >= self._group.size:
            self._tried.add(trial)
            try_block(name, block, (args, kwargs), partial(self._cut, name, dim), self._group)
        return self._cut(name, dim, args, kwargs)

    def _left(self, joins: bool, is_last: bool, block: nn.Module, args: Any, result: Any) -> Any:
        """Return a block's result in full; a training step goes on with parts to its loss."""
        self.in_full.block = None
        goes_on = is_last and block.training and torch.is_grad_enabled()
        return full_tensor(result) if joins and not goes_on else None

    def _cut(
        self, name: str, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        hidden = _hidden_states(args, kwargs)
        if hidden is None or isinstance(hidden, DimShardedTensor):
            return None
        if hidden.shape[dim] < self._group.size:
            self._warn(name, hidden, dim)
            return None
        self.num_cut += 1
        padding = -hidden.shape[dim] % self._group.size
        local = cut_sequence(padded(hidden, dim, padding), dim, self._group)
        part = SequencePart(
            local=local, dim=dim, group=self._group, in_full=self.in_full, padding=padding
        )
        own = wrapped(part)
        arguments: Arguments = tree_map_only(
            Tensor, lambda one: own if one is hidden else one, (args, kwargs)
        )
        return arguments

    def _warn(self, name: str, hidden: Tensor, dim: int) -> None:
        self.num_cut += 1
        if self._warned or not (hidden.requires_grad and torch.is_grad_enabled()):
            return
        self._warned = True
        rank_zero_warn(
            f"The block {name!r} is given hidden states of shape {tuple(hidden.shape)}, whose "
            f"{hidden.shape[dim]} positions are fewer than the {self._group.size} context-parallel "
            f"ranks: each computes them all. Use fewer ranks for each sequence."
        )


def _check(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Refuse models whose sequences cannot be cut between blocks."""
    if not blocks:
        raise ConfigError(
            f"context_parallel cuts sequences between repeated blocks, but {type(model).__name__} "
            f"has no ModuleList or Sequential of two or more modules of one class; expected the "
            f"blocks of a transformer. Use strategy='zero2' or 'zero3'."
        )


def _kind(block: nn.Module) -> Hashable:
    """Return what blocks have in common that compute alike: their modules' classes and switches."""
    return tuple(
        (name, type(module), tuple((n, v) for n, v in vars(module).items() if _is_switch(v)))
        for name, module in block.named_modules()
    )


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str))


def _hidden_states(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first argument of shape (B, S, E) and a floating format."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor) and not one.is_nested and one.ndim == 3:
            return one if one.is_floating_point() else None
    return None


def sequence_dim(block: nn.Module) -> int:
    """Return the dimension of positions in a block's hidden states."""
    attentions = (one for one in block.modules() if isinstance(one, nn.MultiheadAttention))
    return 0 if any(not one.batch_first for one in attentions) else 1
