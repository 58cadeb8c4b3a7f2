"""What a block of another stage seems to return: the right structure, shapes and formats.

The first time, the block's own forward runs on `Elsewhere` values, which costs its Python code and
no arithmetic. Where each tensor of the result looks like one of the arguments (hidden states do),
that is remembered, and the block is not run again, whatever shapes come. A block that cannot run so
(a router counts its tokens) is taken to return what the first block of its class returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.elsewhere import Elsewhere
from lightning_shard.pipeline_parallel.leaves import signature, tensors_in

_PLAIN = (type(None), bool, int, float, str)
_ORIGIN = "a block of an earlier stage"


class UnknownResultError(BaseException):
    """Ends a probe at a block whose result is not known; the cause says why."""


@dataclass(frozen=True)
class _Look:
    """How a tensor of a result looks: as an argument does, or by itself."""

    argument: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def show(self, arguments: Sequence[Tensor]) -> Elsewhere:
        """Return a tensor that looks so."""
        if self.argument is not None:
            like = arguments[self.argument]
            return Elsewhere.of(like, like.shape, _ORIGIN)
        like = torch.empty(0, dtype=self.dtype, device=arguments[0].device)
        return Elsewhere.of(like, self.shape, _ORIGIN)


@dataclass(frozen=True)
class Template:
    """The structure of a block's result.

    Attributes:
        structure: The result, with a look in place of each tensor.
        num_arguments: Tensors that the block was called with.
    """

    structure: Any
    num_arguments: int

    @classmethod
    def of(cls, result: Any, arguments: Sequence[Tensor]) -> "Template":
        """Return the structure of a result."""

        def look(tensor: Tensor) -> _Look:
            same = [
                index
                for index, one in enumerate(arguments)
                if one.shape == tensor.shape and one.dtype == tensor.dtype
            ]
            return _Look(same[0] if same else None, tuple(tensor.shape), tensor.dtype)

        return cls(apply_to_collection(result, Tensor, look), len(arguments))

    @property
    def follows_arguments(self) -> bool:
        """Whether every tensor looks as an argument does, so that any shapes may come."""
        own: list[_Look] = []
        apply_to_collection(self.structure, _Look, own.append)
        return all(look.argument is not None for look in own)

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing that belongs to one call, such as a cache."""
        return _is_plain(self.structure)

    def build(self, arguments: Sequence[Tensor]) -> Any:
        """Return what looks like the result for these arguments."""
        return apply_to_collection(self.structure, _Look, lambda look: look.show(arguments))


class SkippedBlock:
    """Stands in for one block where it is skipped.

    Args:
        block: Its parameters are stand-ins while this is called.

    Attributes:
        hint: What another block of its class returns.
    """

    def __init__(self, block: nn.Module) -> None:
        self.hint: Template | None = None
        self._block = block
        self._templates: dict[Any, Template] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what looks like the block's result for these arguments.

        Raises:
            UnknownResultError: The block needs elements, and there is no hint.
        """
        leaves = tensors_in((args, kwargs))
        shapes = signature(leaves)
        known = self._templates.get(len(leaves)) or self._templates.get(shapes)
        if known is not None:
            return known.build(leaves)
        try:
            result = self._run(args, kwargs)
        except ConfigError as error:
            if self.hint is None or self.hint.num_arguments != len(leaves):
                raise UnknownResultError from error
            return self.hint.build(leaves)
        template = Template.of(result, leaves)
        if template.is_plain:
            self._templates[len(leaves) if template.follows_arguments else shapes] = template
        return result

    @torch.no_grad()
    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._block.forward(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in value)
    return isinstance(value, (*_PLAIN, _Look))
