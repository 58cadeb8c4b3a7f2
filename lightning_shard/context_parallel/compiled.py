"""Compiled blocks where sequences are in parts: what needs no other position stays compiled.

    block.compile()        attention     operation by operation, on parts
                           norm, MLP     compiled, on the rows that are here

The calls of a compiled block in the first step are watched, and modules inside it that were given
one part, gave one back, exchanged nothing, drew nothing and left nothing behind are called with
plain tensors from then on, as compiled as the block was. Not before the step's update: what a
checkpoint computes again in backward has to save the tensors that the forward has saved.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.sequence_part import SequencePart, part_of
from lightning_shard.core.extensions import extend_class, give_class_back, instead
from lightning_shard.data_parallel.torch_private import (
    COMPILED_MODULE,
    DropoutLayer,
    calls_of,
    compiler_of,
    forward_hooks,
    has_compiled_call,
    in_backward,
    set_compiled_call,
)
from lightning_shard.errors import ConfigError

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
        compiled = [(name, one) for name, one in model.named_modules() if _is_compiled(one)]
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


def _is_compiled(module: nn.Module) -> bool:
    return COMPILED_MODULE in module._modules or has_compiled_call(module)


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
                one.register_forward_pre_hook(_WatchingHook(self.began), with_kwargs=True),
                one.register_forward_hook(_WatchingHook(self.ended)),
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
    devices = {one.device for one in module.parameters() if one.is_cuda}
    random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    values = [value for one in module.modules() for value in _values(one)]
    return random, values


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
    return is_plain and not is_one and not _is_compiled(module)


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


class _WatchingHook:
    """Hook before or after a forward; copies of the module, made in a run, are not watched."""

    def __init__(self, tell: Callable[[nn.Module, Any, Any], None] | None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: Any, given: Any) -> None:
        if self._tell is not None:
            self._tell(module, args, given)

    def __deepcopy__(self, memo: Any) -> "_WatchingHook":
        return _WatchingHook(None)
