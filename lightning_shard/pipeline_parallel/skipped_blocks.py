"""Stand-ins for blocks of other stages, which return the right structure, shapes and formats.

The first time, the block itself runs on `Placeholder` values. Where each tensor of the result looks
like one of the arguments, that is remembered, and the block is not run again. A block that cannot
run so (a router counts its tokens) is taken to return what the first block of its class returns.
A block that leaves more than its result behind, such as an auxiliary loss in an attribute, is run
every time, since code that collects these must find a placeholder there, not a value less.
"""

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.core.placeholders import Placeholder, alone, births, note_given
from lightning_shard.data_parallel.recompute.recomputation import CACHES
from lightning_shard.data_parallel.torch_private import without_hooks
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel._torch import without_computing
from lightning_shard.pipeline_parallel.containers import held_values, signature, tensors_in

_PLAIN = (type(None), bool, int, float, str)
_ORIGIN = "a block of an earlier stage"
_MAX_TEMPLATES = 64  # a number that changes with every batch must not fill the memory


class BlockCall(NamedTuple):
    """A call of a block; `function` calls it with its hooks."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """All arguments of the call."""
        return self.args, self.kwargs


class UnknownResultError(BaseException):
    """Ends a probe at a block whose result's metadata are not known; the cause says why."""


@dataclass(frozen=True)
class _ResultMetadata:
    """Metadata of a tensor in a block's result; `argument` is the index of one with the same."""

    argument: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def show(self, arguments: Sequence[Tensor]) -> Placeholder:
        """Return a placeholder with these metadata."""
        if self.argument is not None:
            like = arguments[self.argument]
            if isinstance(like, Placeholder):  # attributes of one are calls: the short way
                return Placeholder(like.like, like.place, _ORIGIN)
            return Placeholder.of(like, like.shape, _ORIGIN)
        like = torch.empty(0, dtype=self.dtype, device=arguments[0].device)
        return Placeholder.of(like, self.shape, _ORIGIN)


@dataclass(frozen=True)
class Template:
    """The structure of a block's result.

    Attributes:
        structure: The result, with metadata in place of each tensor.
        num_arguments: Number of tensors that the block was called with.
        keeps_gradients: Whether the block keeps other tensors that require gradients.
    """

    structure: Any
    num_arguments: int
    keeps_gradients: bool = False

    @classmethod
    def of(cls, result: Any, arguments: Sequence[Tensor]) -> "Template":
        """Return the structure of a result."""

        def metadata(tensor: Tensor) -> _ResultMetadata:
            same = [
                index
                for index, one in enumerate(arguments)
                if one.shape == tensor.shape and one.dtype == tensor.dtype
            ]
            return _ResultMetadata(same[0] if same else None, tuple(tensor.shape), tensor.dtype)

        return cls(apply_to_collection(result, Tensor, metadata), len(arguments))

    @property
    def follows_arguments(self) -> bool:
        """Whether the result's metadata follow from the arguments', whatever shapes come."""
        found: list[Any] = []
        apply_to_collection(self.structure, (_ResultMetadata, int, float), found.append)
        return all(getattr(one, "argument", None) is not None for one in found)

    @property
    def is_plain(self) -> bool:
        """Whether the result holds no object that belongs to one call, such as a cache."""
        return _is_plain(self.structure)

    def build(self, arguments: Sequence[Tensor]) -> Any:
        """Return placeholders in the structure of the result for these arguments."""
        if isinstance(self.structure, _ResultMetadata):
            return self.structure.show(arguments)
        return apply_to_collection(
            self.structure, _ResultMetadata, lambda metadata: metadata.show(arguments)
        )


Skipped = Callable[[BlockCall], Any]
"""Answers the call of a block that is skipped."""


class SkippedBlock:
    """Stands in for one block where it is skipped."""

    def __init__(self, block: nn.Module, name: str = "") -> None:
        self.hint: Template | None = None
        self._block, self._name = block, name
        self._keeps = False  # values beside its result
        self._templates: dict[Any, Template] = {}

    def __call__(self, call: BlockCall) -> Any:
        """Return placeholders in the structure of the block's result for a call's arguments."""
        leaves = tensors_in(call.arguments)
        note_given(leaves)
        settings = _settings(call.arguments)
        known = self._templates.get((len(leaves), settings))
        if known is None:
            known = self._templates.get((signature(leaves), settings))
        if known is not None:
            return known.build(leaves)
        with births() as born:
            result, template = self._run(call, leaves)
        if template is None:
            return result
        del result
        self._keeps = self._keeps or _outlives(born)
        if not self._keeps:
            if len(self._templates) == _MAX_TEMPLATES:
                self._templates.clear()
            key = len(leaves) if template.follows_arguments else signature(leaves)
            self._templates[key, settings] = template
        return template.build(leaves)

    @torch.no_grad()
    def _run(self, call: BlockCall, leaves: Sequence[Tensor]) -> tuple[Any, Template | None]:
        """Return a result of the block and its template, which is None where the result counts."""
        try:
            with without_computing(self._block.modules()):  # of weights that another stage has
                result = _on_copies(call)
        except ConfigError as error:
            if not self._runs_without_hooks(call):
                if self.hint is None or self.hint.num_arguments != len(leaves):
                    raise UnknownResultError from error
                return None, self.hint
            raise ConfigError(
                f"A hook on the forward of {self._name!r}, a block of another stage of the "
                f"pipeline, or of a module in it, asks for elements there ({error}), so that what "
                f"it does would be done on one stage alone; expected hooks that take tensors as "
                f"they are. Give self.log or a logger the tensor (output.mean(), without item()), "
                f"or use strategy='zero3'."
            ) from error
        template = Template.of(result, leaves)
        return (None, template) if template.is_plain else (result, None)

    def _runs_without_hooks(self, call: BlockCall) -> bool:
        try:
            with without_hooks(*self._block.modules()):
                _on_copies(call._replace(function=self._block.forward))
        except ConfigError:
            return False
        return True


def template_of_call(call: BlockCall, forget: Callable[[], None]) -> Template:
    """Call a block with values, and return the structure of its result."""
    leaves = tensors_in(call.arguments)
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        _ComputedTensors(leaves) as computed,
        alone(),
    ):
        result = _on_copies(call)
    template = Template.of(result, leaves)
    del result
    forget()
    return replace(template, keeps_gradients=_outlives(computed.followed))


class _ComputedTensors(TorchFunctionMode):
    """Notes the tensors that are computed inside of those given, and require gradients."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._given = {id(one) for one in given}  # `to` and such may return them
        self.followed: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result) if isinstance(result, Tensor | tuple | list) else ():
            if not tensor.is_leaf and id(tensor) not in self._given:
                self.followed.append(weakref.ref(tensor))
        return result


def _on_copies(call: BlockCall) -> Any:
    """Call with copies of the arguments' tensors, to see whether the block keeps them."""
    with uncompiled():
        kwargs = {name: _copied(one) for name, one in call.kwargs.items()}
        return call.function(*map(_copied, call.args), **kwargs)


def uncompiled() -> AbstractContextManager[None]:
    """Make the context in which compiled code runs uncompiled, as for stand-ins."""
    if "torch._dynamo" not in sys.modules:  # which takes long to import
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _copied(value: Any) -> Any:
    if any(cls.__module__ == CACHES for cls in type(value).__mro__):
        return copy.deepcopy(value)
    if isinstance(value, Placeholder):
        return value.again()
    if isinstance(value, Tensor) and value.is_inference() and not torch.is_inference_mode_enabled():
        return value.clone()
    return value


def _outlives(born: Sequence["weakref.ref[Any]"]) -> bool:
    """Whether one of these tensors is still alive."""
    if any(one() is not None for one in born):
        gc.collect()
    return any(one() is not None for one in born)


def _settings(value: Any) -> tuple[Any, ...]:
    """Return the numbers, strings and such in a block's arguments."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    held = None if isinstance(value, Tensor) else held_values(value)
    return (
        () if held is None else tuple(found for one in held.values() if (found := _settings(one)))
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)
    return isinstance(value, (*_PLAIN, _ResultMetadata))
