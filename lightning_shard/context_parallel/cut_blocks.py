"""Cutting the sequence where a model's repeated blocks begin, and joining it where they end.

    embedding ──> x ──cut──> block 0 ──> block 1 ──> ... ──> block n ──> norm, head, cross entropy
                  (B, S, E)     (B, S / W, E) on each rank        (B, S / W, V)

The blocks are those that the engine makes units of. A block is given its other arguments as they
are: masks, positions and rotary tables stay full, and what an operation needs of them it takes.
In a training step the result of the last list's blocks stays in parts until an operation needs all
of it; elsewhere it is gathered.
Where W does not divide the positions, the last rank has copies of the last one in their place.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.compiled import CompiledModules
from lightning_shard.context_parallel.crossings import cut_sequence
from lightning_shard.context_parallel.huggingface_attention import AttentionFunctions
from lightning_shard.context_parallel.sequence_part import FullSequences, SequencePart, padded
from lightning_shard.context_parallel.trial import try_block
from lightning_shard.data_parallel.units import named_blocks
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import stands_in
from lightning_shard.tensor_parallel.compared_calls import Arguments
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    full_tensor,
    wrapped,
)


class CutBlocks:
    """Cuts the hidden states of a model's blocks until `restore`.

    Args:
        model: The model, whose blocks are found.
        group: Group of the W ranks that share each sequence.
        joins_each: Whether each block gives full hidden states, as where stages send them.
        tries: Whether the first call of each kind of block is tried before it is believed.

    Attributes:
        blocks: The blocks, by name.
        num_cut: Number of calls that were given hidden states so far.
        in_full: Knows which operations needed the full sequence.

    Raises:
        ConfigError: The model has no repeated blocks, or is compiled as a whole.
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
            enter = _Hook(partial(self._entered, name, sequence_dim(block)))
            self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            joins = joins_each or name in last.values()
            leave = _Hook(partial(self._left, joins, name == end and not joins_each))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        self._compiled.begin()

    def check_cut(self, model: nn.Module) -> None:
        """Refuse to train where no block has been given hidden states.

        Raises:
            ConfigError: None of the blocks was called with a tensor of shape (B, S, E).
        """
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
        return self._with(hidden, wrapped(part), args, kwargs)

    def _with(
        self, hidden: Tensor, cut: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Return arguments with `cut` for `hidden`."""
        new: Arguments = tree_map_only(
            Tensor, lambda one: cut if one is hidden else one, (args, kwargs)
        )
        return new

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


class _Hook:
    """Hook before or after a block's forward; copies of the block, made in a run, have it, too."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self


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
