"""Experts in tensors: a call with all tokens becomes one with the tokens of this rank's experts.

    experts(tokens (T, H), experts of each (T, K), weights (T, K))
      one row for each token and expert, sorted by expert ──rows, weights──> the experts' ranks
      own forward(rows (R, H), which of the E / W (R, 1), weights (R, 1)) ──results──> back
      the K results of a token, summed

The module's own forward does what it does with a weight: so that its gradient is right, the weight
travels with the row. Entries that name no expert (dropped tokens) give zeros, as there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import in_backward, unobserved
from lightning_shard.data_parallel.units.units import class_name
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.exchange import Routes
from lightning_shard.expert_parallel.finding import Mixture
from lightning_shard.expert_parallel.load import Load
from lightning_shard.expert_parallel.own_tokens import GivenTokens
from lightning_shard.tensor_parallel.compared_calls import as_it_was

Forward = Callable[..., Any]


class BatchedExperts:
    """Calls of one module that has experts in tensors, which W ranks share.

    Attributes:
        load: What the experts got.
        mixture: The experts and their module.
        anchor: A leaf without elements; each backward has gradients of the tokens.
        is_own: Whether the experts' own forward runs.
    """

    def __init__(self, mixture: Mixture, group: Collectives, *, is_dry: bool = False) -> None:
        self.mixture, self._group, self._is_dry = mixture, group, is_dry
        self.load = Load()
        self.anchor = torch.zeros(0, 1, requires_grad=True)
        self.is_own = self._has_rows_of_all = False
        self._num_here = mixture.num_experts // group.size
        self._likes: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # results without rows

    def __deepcopy__(self, memo: Any) -> "BatchedExperts":
        return self

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
        routes = Routes(counts, self._group, peers_alike=self._is_dry)
        order = order[: sum(routes.sent)]
        if module.training and torch.is_grad_enabled() and not in_backward():
            self.load.note(routes.sent, self._group.rank, routes.rows.sum(0))
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
        before, self.is_own = self.is_own, True
        try:
            with self._counting_own(module), self._with_rows_of_all(module):
                result = own(*args, **kwargs)
        except IndexError:  # it counts on as many experts as there are, under another name
            if self._has_rows_of_all:
                raise
            self._has_rows_of_all = True
            return self._computed(module, own, given, numbers, rows, weights)
        finally:
            self.is_own = before
        if not isinstance(result, Tensor) or result.shape[:1] != rows.shape[:1]:
            raise self._refused(module, f"returns {_told(result)} for {rows.shape[0]} tokens")
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
        names = [n for n, value in vars(module).items() if "expert" in n and value == total]
        return _set(module, dict.fromkeys(names, self._num_here))

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
        values = [*args, *kwargs.values()]
        told = ", ".join(map(_told, values))
        raise self._refused(self.mixture.module, f"is called with {told}")

    def _refused(self, module: nn.Module, what: str) -> ConfigError:
        return ConfigError(
            f"Rank {self._group.rank}: {self.mixture.name!r} ({class_name(module)}) "
            f"{what}; expected tokens (T, H), the numbers of their experts (T, K) and weights "
            f"(T, K), and a result for each token. Leave expert_parallel_size out, and use "
            f"zero_stage=3 to share out parameters."
        )


@contextmanager
def _set(module: nn.Module, values: dict[str, Any]) -> Any:
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _told(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
