"""Experts in tensors: a call with all tokens becomes one with the tokens of this rank's experts.

    experts(tokens (T, H), experts of each (T, K), weights (T, K))
      one row for each token and expert, sorted by expert ──rows, weights──> the experts' ranks
      own forward(rows (R, H), which of the E / W (R, 1), weights (R, 1)) ──results──> back
      the K results of a token, summed

The module's own forward does what it does with a weight: so that its gradient is right, the weight
travels with the row. Entries that name no expert (dropped tokens) give zeros, as there.

Where a sequence is in parts, each rank computes its own tokens:

    tokens (B S, H)      experts (B S, K)      weights (B S, K)       each cut over C ranks, or full
       └── the own rows of each ──> own forward ──> the own rows of the result (B S, H)

Experts in lists choose their rows themselves: they are given the whole sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import extend_class, give_class_back
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.torch_private import unobserved
from lightning_shard.data_parallel.units.units import class_name
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.exchange import ExpertCalls, told
from lightning_shard.expert_parallel.finding import ADVICE, Mixture, find_mixtures
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part
from lightning_shard.tensor_parallel.trial import as_it_was

Forward = Callable[..., Any]


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


class BatchedExperts(ExpertCalls):
    """Calls of one module that has experts in tensors, which W ranks share."""

    def __init__(self, mixture: Mixture, group: Collectives, *, is_dry: bool = False) -> None:
        super().__init__(mixture, group, is_dry=is_dry)
        self._has_rows_of_all = False
        self._likes: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # results without rows

    def is_full(self, module: nn.Module) -> bool:
        """Whether a module, a copy say, has all experts."""
        first = next(module.parameters(recurse=False))
        return first.shape[0] == self.mixture.num_experts

    def whole(self, module: nn.Module, own: Forward) -> Forward:
        """Return the call of a module that has all experts."""
        return own

    def call(self, module: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any) -> Tensor:
        """Call a module with this rank's tokens; each rank must call."""
        given = self._given(args, kwargs)
        tokens, experts = given.values[given.tokens], given.values[given.experts]
        weights: Tensor = given.values[given.weights]
        num_each = experts.shape[-1]
        order, counts = self._sorted(experts.reshape(-1))  # (S,), S = T K
        routes = self._routes(counts)
        order = order[: sum(routes.sent)]
        self._note(module, routes)
        rows = tokens.reshape(-1, tokens.shape[-1])[order // num_each]
        received = routes.to_experts(rows, weights.reshape(-1, 1)[order])
        numbers = routes.local_experts()
        (back,) = routes.to_tokens(self._computed(module, own, given, numbers, *received))
        full = back.new_zeros(experts.numel(), back.shape[-1]).index_copy(0, order, back)
        summed = full.view(-1, num_each, back.shape[-1]).sum(1)
        return summed.view(*tokens.shape[:-1], back.shape[-1])

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order by expert of rows, (S,), and how many rows each expert gets, (E,)."""
        num_experts, num_rows = self.mixture.num_experts, chosen.shape[0]
        if self._is_dry:
            counts = torch.full((num_experts,), num_rows // num_experts)
            counts[: num_rows % num_experts] += 1
            return torch.arange(num_rows), counts
        is_sent = (chosen >= 0) & (chosen < num_experts)
        order = torch.where(is_sent, chosen, num_experts).argsort(stable=True)
        return order, torch.bincount(chosen[is_sent], minlength=num_experts)

    def alone(self, module: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any) -> Tensor:
        """Return a result of the right shape and format, zeros; nothing is exchanged."""
        given = self._given(args, kwargs)
        tokens, weights = given.values[given.tokens], given.values[given.weights]
        nothing = tokens.reshape(-1, tokens.shape[-1])[:0]
        none = self._without_rows(module, own, given, nothing, weights.reshape(-1, 1)[:0])
        return (none.new_zeros(*tokens.shape[:-1], none.shape[-1]) + none.sum()).to(none.dtype)

    def _computed(
        self,
        module: nn.Module,
        own: Forward,
        given: GivenTokens,
        numbers: Tensor,
        rows: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return the results of this rank's experts."""
        if not rows.shape[0]:
            return self._without_rows(module, own, given, rows, weights)
        others = {given.tokens: rows, given.experts: numbers.unsqueeze(1), given.weights: weights}
        args, kwargs = given.with_others(others)
        counting, with_rows = self._counting_own(module), self._with_rows_of_all(module)
        try:
            with setting(self, is_own=True), counting, with_rows:
                result = own(*args, **kwargs)
        except IndexError:  # it counts on as many experts as there are, under another name
            if self._has_rows_of_all:
                raise
            self._has_rows_of_all = True
            return self._computed(module, own, given, numbers, rows, weights)
        if not isinstance(result, Tensor) or result.shape[:1] != rows.shape[:1]:
            raise self._refused(module, f"returns {told([result])} for {rows.shape[0]} tokens")
        return result

    def _without_rows(
        self, module: nn.Module, own: Forward, given: GivenTokens, rows: Tensor, weights: Tensor
    ) -> Tensor:
        """Return no result, which depends on all that others do, as gradients go back together."""
        kind = rows.shape[-1], rows.dtype, torch.is_autocast_enabled(rows.device.type)
        if kind not in self._likes:
            number = torch.zeros(1, dtype=torch.int64, device=rows.device)
            one = rows.new_zeros(1, rows.shape[-1]), weights.new_zeros(1, 1)
            seen = nullcontext() if self._is_dry else unobserved()
            with seen, torch.no_grad(), as_it_was(module):
                self._likes[kind] = self._computed(module, own, given, number, *one)[:0]
        like = self._likes[kind]
        sums = [one.reshape(-1)[:0].sum() for one in (rows, weights, *module.parameters())]
        return like + sum(one.to(like) for one in sums)

    def _counting_own(self, module: nn.Module) -> AbstractContextManager[None]:
        """Let a module know inside how many experts it has here."""
        total = self.mixture.num_experts
        counts = [name for name, one in vars(module).items() if "expert" in name and one == total]
        return setting(module, **dict.fromkeys(counts, self._num_here))

    @contextmanager
    def _with_rows_of_all(self, module: nn.Module) -> Iterator[None]:
        """Let weights have rows of all experts inside if need be: zeros, which no token is for."""
        params = vars(module)["_parameters"]
        num_others = self.mixture.num_experts - self._num_here
        wide = {
            name: torch.cat([one, one.new_zeros(num_others, *one.shape[1:])])
            for name, one in params.items()
            if self._has_rows_of_all and one is not None
        }
        with patch.dict(params, wide):
            yield

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GivenTokens:
        """Return which of a call's arguments are which."""
        given = GivenTokens.of(args, kwargs)
        if given is not None:
            return given
        values = told([*args, *kwargs.values()])
        raise self._refused(self.mixture.module, f"is called with {values}")

    def _refused(self, module: nn.Module, what: str) -> ConfigError:
        return ConfigError(
            f"Rank {self._group.rank}: {self.mixture.name!r} ({class_name(module)}) "
            f"{what}; expected tokens (T, H), the numbers of their experts (T, K) and weights "
            f"(T, K), and a result for each token. {ADVICE}"
        )
