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

Compiled blocks where sequences are in parts: what needs no other position stays compiled.

    block.compile()        attention     operation by operation, on parts
                           norm, MLP     compiled, on the rows that are here

The calls of a compiled block in the first step are watched, and modules inside it that were given
one part, gave one back, exchanged nothing, drew nothing and left nothing behind are called with
plain tensors from then on, as compiled as the block was. Not before the step's update: what a
checkpoint computes again in backward has to save the tensors that the forward has saved.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.attention import own_heads, own_heads_of_mask
from lightning_shard.context_parallel.crossings import cut_sequence, exchange
from lightning_shard.context_parallel.sequence_part import (
    FullSequences,
    SequencePart,
    padded,
    part_of,
)
from lightning_shard.core.extensions import extend_class, give_class_back, instead
from lightning_shard.core.modules import generator_states, gpus_of
from lightning_shard.core.placeholders import stands_in
from lightning_shard.core.states import Asker, asker, having
from lightning_shard.core.tensor_calls import Args, Kwargs
from lightning_shard.data_parallel.recompute.recomputation import own_forward
from lightning_shard.data_parallel.torch_private import (
    COMPILED_MODULE,
    DropoutLayer,
    calls_of,
    compiler_of,
    forward_hooks,
    in_backward,
    is_compiled,
    set_compiled_call,
)
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

Forward = Callable[..., Any]
_PLACE = "_lightning_shard_rows"


class CompiledModules:
    """Runs the compiled modules of a model on parts, from `begin` until `restore`."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], group: Collectives
    ) -> None:
        self._taken = ExitStack()
        self._watched: list[_WatchedModule] = []
        self._group, self._blocks = group, list(blocks.values())
        inside = {one for block in blocks.values() for one in block.modules()}
        compiled = [(name, one) for name, one in model.named_modules() if is_compiled(one)]
        for name, module in compiled:
            if module not in inside and any(one in inside for one in module.modules()):
                raise ConfigError(
                    f"{name or type(model).__name__} ({type(module).__name__}) is compiled as a "
                    f"whole, but context_parallel cuts sequences where its blocks begin; expected "
                    f"that blocks are compiled, each by itself. Use block.compile() for them."
                )
        self._compiled = [module for _, module in compiled]

    def begin(self) -> None:
        """Run them as written where they are given parts; after the hooks that cut sequences."""
        for module in self._compiled:
            own = module._modules.get(COMPILED_MODULE) or module
            self._watched.append(_WatchedModule(own, compiler_of(module), self._group))
            self._take(module, own, is_block=module in self._blocks)

    def _take(self, module: nn.Module, own: nn.Module, *, is_block: bool) -> None:
        if module is own:
            compiled, as_written = calls_of(module)  # with hooks
            # a block is given full tensors, which its first hook cuts
            by_arguments = partial(_by_arguments, as_written, compiled)
            set_compiled_call(module, None if is_block else by_arguments)
            self._taken.callback(set_compiled_call, module, compiled)
        else:
            self._taken.enter_context(instead(module, "forward", partial(_by_arguments, own)))

    def share_out(self) -> None:
        """Run compiled, from the next step on, what needed nothing but its rows in this one."""
        for one in self._watched:
            one.share_out()

    def restore(self) -> None:
        """Let the modules run compiled again."""
        self._taken.close()
        for one in self._watched:
            one.restore()
        self._watched = []


def _by_arguments(as_written: Forward, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code where no argument is a part."""
    has_parts = any(part_of(one) is not None for one in tree_leaves((args, kwargs)))
    return (as_written if has_parts else compiled)(*args, **kwargs)


@dataclass
class _WatchedCall:
    """What was known when a module was called."""

    part: SequencePart | None
    num_exchanges: int
    random: list[Tensor]
    attributes: list[int] = field(default_factory=list)


class _WatchedModule:
    """Watches the calls of a compiled module in its first step, and shares it out."""

    def __init__(
        self, module: nn.Module, compiler: Callable[[Forward], Forward], group: Collectives
    ) -> None:
        self._module, self._compiler, self._group = module, compiler, group
        self._calls: dict[nn.Module, _WatchedCall] = {}
        self._alone: dict[nn.Module, bool] = {}  # whether it needs nothing but its rows
        self._rows: list[nn.Module] = []
        self._is_watching = self._was_called = False
        self._handles: list[RemovableHandle] = []
        for one in module.modules():
            self._handles += [
                one.register_forward_pre_hook(
                    TracedHook(self.began, _not_watched), with_kwargs=True
                ),
                one.register_forward_hook(TracedHook(self.ended, _not_watched)),
            ]

    def began(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a call begins with."""
        if module is self._module:
            is_again = in_backward()  # a checkpoint computes it again
            self._is_watching = module.training and torch.is_grad_enabled() and not is_again
        if not self._is_watching:
            return
        part = part_of(args[0]) if len(args) == 1 and not kwargs else None
        self._calls[module] = _WatchedCall(part, self._num_exchanges(), *_left_behind(module))

    def ended(self, module: nn.Module, args: Any, result: Any) -> None:
        """Decide whether a call needed nothing but its rows."""
        call = self._calls.pop(module, None)
        if not self._is_watching or call is None:
            return
        given, returned = call.part, part_of(result)
        random, attributes = _left_behind(module)
        self._alone[module] = (
            given is not None
            and returned is not None
            and (given.dim, given.num_blocks, given.padding)
            == (returned.dim, returned.num_blocks, returned.padding)
            and self._num_exchanges() == call.num_exchanges
            and attributes == call.attributes
            and all(map(torch.equal, random, call.random))
            and self._alone.get(module, True)
        )
        if module is self._module:
            self._is_watching, self._was_called = False, True

    def _num_exchanges(self) -> int:
        return sum(one.calls for one in self._group.traffic.values())

    def share_out(self) -> None:
        """Let modules that need nothing but their rows run compiled on them."""
        if not self._was_called:
            return
        self._was_called = False
        for handle in self._handles:
            handle.remove()
        inside: set[nn.Module] = set()
        for module in self._module.modules():
            if module not in inside and self._alone.get(module) and _is_worth_it(module):
                inside |= set(module.modules())
                self._rows.append(module)
                compiled = self._compiler(type(module).forward.__get__(module))
                vars(module)[_PLACE] = _Rows(compiled, list(module.modules()))
                extend_class(module, "OnRows", _OnRows)
        self._calls, self._alone = {}, {}

    def restore(self) -> None:
        """Undo it all."""
        for handle in self._handles:
            handle.remove()
        for module in self._rows:
            del vars(module)[_PLACE]
            give_class_back(module, (_OnRows,))
        self._rows = []


def _left_behind(module: nn.Module) -> tuple[list[Tensor], list[int]]:
    """Return the state of random numbers, and what attributes are now."""
    values = [value for one in module.modules() for value in _values(one)]
    return generator_states(gpus_of(module)), values


def _values(module: nn.Module) -> Iterator[int]:
    for value in vars(module).values():
        yield id(value)
        if isinstance(value, list | dict | set):
            yield len(value)
    for buffer in module.buffers(recurse=False):
        yield buffer._version


def _is_worth_it(module: nn.Module) -> bool:
    """Whether a module does more than one operation, as layers of torch do."""
    is_plain = "forward" not in vars(module) and type(module).forward is not nn.Module.forward
    is_one = type(module).__module__.startswith("torch.nn.") and not list(module.children())
    return is_plain and not is_one and not is_compiled(module)


class _Rows:
    """How a module runs on the rows that are here; a copy of it runs as it is written."""

    def __init__(self, compiled: Forward | None, modules: list[nn.Module]) -> None:
        self.compiled, self._modules = compiled, modules

    def __deepcopy__(self, memo: Any) -> "_Rows":
        return _Rows(None, [])

    def fits(self, args: Any, kwargs: Any) -> SequencePart | None:
        """Return the part to run on; None to run as it is written."""
        if self.compiled is None or kwargs or len(args) != 1:
            return None
        needs_part = any(map(forward_hooks, self._modules[1:])) or any(map(_drops, self._modules))
        return None if needs_part else part_of(args[0])


def _drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers, which have to be those of a single device."""
    return module.training and isinstance(module, DropoutLayer) and module.p > 0


class _OnRows:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows: _Rows = vars(self)[_PLACE]
        part = rows.fits(args, kwargs)
        if part is None or rows.compiled is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return part.widen(rows.compiled(part.local))


def _not_watched(*_: Any) -> None:
    """Stand in for the hooks of a watched module in its copies, which are made in a run."""


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

    def __init__(self, name: str, function: Forward) -> None:
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

    def differs(found: str) -> str:
        return (
            f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) computes something "
            f"else of a sequence in {group.size} parts than of the full one: {found}. Expected "
            f"equal results, so nothing was trained. Use strategy='zero3' with "
            f"activation_checkpointing='full', or tensor_parallel with sequence_parallel=True; "
            f"please report the block's forward."
        )

    def fails(error: str) -> str:
        return (
            f"Rank {group.rank}: the block {name!r} ({type(block).__name__}) runs with the full "
            f"sequence, but not with a sequence in {group.size} parts ({error}); expected "
            f"operations of torch that can be called with a subclass of Tensor. Use "
            f"scaled_dot_product_attention for attention, or strategy='zero3' with "
            f"activation_checkpointing='full'."
        )

    with having(asker, Asker.ENGINE):
        trained = {path: one for path, one in block.named_parameters() if one.requires_grad}
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
            with as_it_was(block), explained(fails):
                parts = Called(in_parts, arguments, own, double=double)
        for grad in parts.of_params:  # the mean over the ranks, as the engine takes it
            group.all_reduce(grad)
            grad.div_(group.size)
        return full, parts

    refuse_difference(group, compared, [*trained], differs)


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
        compiled: Those of the model's modules that are compiled.
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
        self.compiled = CompiledModules(model, self.blocks, group)
        self._functions = AttentionFunctions()
        last = {name.rpartition(".")[0]: name for name in self.blocks}
        end = next(reversed(last.values()), None)
        for name, block in self.blocks.items():
            enter = TracedHook(partial(self._entered, name, sequence_dim(block)))
            self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            joins = joins_each or name in last.values()
            leave = TracedHook(partial(self._left, joins, name == end and not joins_each))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        self.compiled.begin()

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

    def restore(self) -> None:
        """Let blocks be called with full sequences again."""
        self.compiled.restore()
        self._functions.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entered(
        self, name: str, dim: int, block: nn.Module, args: Args, kwargs: Kwargs
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

    def _cut(self, name: str, dim: int, args: Args, kwargs: Kwargs) -> Arguments | None:
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
    switches = type(None), bool, str
    return tuple(
        (name, type(module), *(one for one in vars(module).items() if isinstance(one[1], switches)))
        for name, module in block.named_modules()
    )


def _hidden_states(args: Sequence[Any], kwargs: Kwargs) -> Tensor | None:
    """Return the first argument of shape (B, S, E) and a floating format."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor) and not one.is_nested and one.ndim == 3:
            return one if one.is_floating_point() else None
    return None


def sequence_dim(block: nn.Module) -> int:
    """Return the dimension of positions in a block's hidden states."""
    attentions = (one for one in block.modules() if isinstance(one, nn.MultiheadAttention))
    return 0 if any(not one.batch_first for one in attentions) else 1
