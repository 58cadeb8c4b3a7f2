"""Experts in tensors compute this rank's tokens where a sequence is in parts.

    tokens (B S, H)      experts (B S, K)      weights (B S, K)       each cut over C ranks, or full
       └── the own rows of each ──> own forward ──> the own rows of the result (B S, H)

Experts in lists choose their rows themselves: they are given the whole sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_shard.core.modules import give_class_back
from lightning_shard.expert_parallel.finding import find_mixtures
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part
from lightning_shard.tensor_parallel.full_view import extend_class


@dataclass(frozen=True)
class GivenTokens:
    """Arguments of experts' call, and which of them are which."""

    values: Mapping[int | str, Any]
    tokens: int | str
    experts: int | str
    weights: int | str

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "GivenTokens | None":
        """Return which of a call's arguments are which; None where they are others."""
        values: dict[int | str, Any] = dict(enumerate(args))
        values.update(kwargs)
        tensors = {name: one for name, one in values.items() if isinstance(one, Tensor)}
        floats = [name for name, one in tensors.items() if one.is_floating_point()]
        numbers = [n for n, one in tensors.items() if n not in floats and one.ndim > 1]
        if len(numbers) == 1 and len(floats) == len(tensors) - 1 == 2:
            shape = tensors[numbers[0]].shape
            for tokens, weights in (floats, floats[::-1]):
                if tensors[weights].shape == shape and tensors[tokens].shape[:-1] == shape[:-1]:
                    return cls(values, tokens, numbers[0], weights)
        return None

    def with_others(self, values: Mapping[int | str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call in which some are others."""
        all_of_them = {**self.values, **values}
        args = [one for place, one in all_of_them.items() if isinstance(place, int)]
        return args, {name: one for name, one in all_of_them.items() if isinstance(name, str)}


@dataclass(frozen=True)
class OwnRows:
    """The arguments of a call that are here of a sequence in parts."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    part: Part

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "OwnRows | None":
        """Return what is here of experts' arguments; None where no part of them is enough."""
        given = GivenTokens.of(args, kwargs)
        tokens = None if given is None else given.values[given.tokens]
        part = tokens.part if isinstance(tokens, DimShardedTensor) else None
        if given is None or part is None or not part.has_own_rows or part.place == 1:
            return None
        names = (given.tokens, given.experts, given.weights)
        own = {name: part.operand(given.values[name]) for name in names}
        if any(one is NotImplemented for one in own.values()):
            return None
        return cls(*given.with_others(own), part)

    def of_all(self, result: Tensor) -> Any:
        """Return the result of the own rows as that of all rows."""
        return self.part.widen(result, self.part.dim)


class OwnTokens:
    """Lets a model's experts in tensors compute the tokens of this rank, until `restore`."""

    def __init__(self, model: nn.Module) -> None:
        self._changed = [one.module for one in find_mixtures(model) if one.is_batched]
        for module in self._changed:
            extend_class(module, "OwnTokens", _OnOwnTokens)

    def restore(self) -> None:
        """Give the experts their own forwards back."""
        for module in self._changed:
            give_class_back(module, (_OnOwnTokens,))
        self._changed = []


class _OnOwnTokens:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward, rows = super().forward, OwnRows.of(args, kwargs)  # type: ignore[misc]
        if rows is None:
            return forward(*args, **kwargs)
        return rows.of_all(forward(*rows.args, **rows.kwargs))
