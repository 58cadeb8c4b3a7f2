"""The mixtures of a model whose experts are on several ranks: their forwards, until `restore`.

mixture(tokens) ──> own class with another forward ──> exchange, own forward of the experts here
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.expert_parallel.batched import BatchedExperts
from lightning_shard.expert_parallel.finding import Mixture
from lightning_shard.expert_parallel.full_weights import ExpertView, ExpertWeights
from lightning_shard.expert_parallel.listed import ListedExperts
from lightning_shard.expert_parallel.load import ExpertLoad, loads_of_ranks
from lightning_shard.expert_parallel.own_tokens import OwnRows
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.expert_parallel.trial import try_mixture
from lightning_shard.module_classes import give_class_back
from lightning_shard.placeholders import is_alone, stands_in
from lightning_shard.tensor_parallel.compared_calls import Arguments
from lightning_shard.tensor_parallel.full_view import extend_class, set_view, view_of

_PLACE = "_lightning_shard_experts"
_Calls = BatchedExperts | ListedExperts


class SharedExperts:
    """Lets the mixtures of a model send tokens to the ranks of their experts.

    Args:
        mixtures: The mixtures, whose experts have been split.
        split: How they are split.
        with_shards: Makes a context inside which parameters are what this rank has of them.
        in_pipeline: Whether the model is cut into stages.
        counts: Whether this rank counts tokens that others of its sequence compute as well.
        tries: Whether the first call of each class of mixtures is tried before it is believed.
        is_dry: Whether nothing has elements, so that tokens go to all experts alike.
    """

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        split: ExpertSplit,
        with_shards: Callable[[], AbstractContextManager[None]],
        *,
        in_pipeline: bool = False,
        counts: bool = True,
        tries: bool = True,
        is_dry: bool = False,
    ) -> None:
        self._split, self._with_shards, self._tries = split, with_shards, tries
        self._counts = counts
        self._tried: set[tuple[type[nn.Module], bool]] = set()
        self._calls: dict[str, _Calls] = {}
        self._changed: list[nn.Module] = []
        self.weights = ExpertWeights(split, in_pipeline=in_pipeline)
        for one in mixtures:
            calls: _Calls = (
                BatchedExperts(one, split.group, is_dry=is_dry)
                if one.is_batched
                else ListedExperts(one, split.group, in_pipeline=in_pipeline, is_dry=is_dry)
            )
            self._calls[one.name] = calls
            self._change(one.module, one.name, _Mixing, (self, calls), calls)
            for number, expert in enumerate(one.experts):
                name = f"{one.name}.{number}"
                self._change(expert, name, _OneOfMany, (calls, number), calls)
                for inner_name, inner in list(expert.named_modules())[1:]:
                    self._change(inner, f"{name}.{inner_name}", _Inner, None, calls)

    def __deepcopy__(self, memo: Any) -> "SharedExperts":
        return self

    def _change(self, module: nn.Module, layer: str, mixin: type, place: Any, calls: Any) -> None:
        held: dict[str, Any] = module.__dict__["_parameters"]
        params = {name: one for name, one in held.items() if self._split.is_spread(one)}
        if mixin is _Inner and not params:
            return
        inner = view_of(module)
        vars(module)[_PLACE] = place, inner
        if params:
            view = ExpertView(
                weights=self.weights, params=params, calls=calls, inner=inner, layer=layer
            )
            set_view(module, view)
        extend_class(module, "Shared", mixin, params)
        self._changed.append(module)

    @untraced
    def run(
        self, calls: _Calls, module: nn.Module, own: Callable[..., Any], arguments: Arguments
    ) -> Any:
        """Call a mixture; each rank that shares its experts must."""
        if stands_in(module, arguments):
            return calls.whole(module, own)(*arguments[0], **arguments[1])
        if is_alone():
            return calls.alone(module, own, *arguments)
        rows = OwnRows.of(*arguments) if isinstance(calls, BatchedExperts) else None
        calls.load.is_counted = self._counts or rows is not None
        if rows is None:
            return self._call(calls, module, own, arguments)
        here = self._call(calls, module, own, (tuple(rows.args), dict(rows.kwargs)))
        return rows.of_all(here)

    def _call(
        self, calls: _Calls, module: nn.Module, own: Callable[..., Any], arguments: Arguments
    ) -> Any:
        with self._with_shards():
            if calls.is_full(module):  # a copy with full weights
                return calls.whole(module, own)(*arguments[0], **arguments[1])
            kind = type(module), torch.is_grad_enabled()
            if self._tries and kind not in self._tried:
                self._tried.add(kind)
                try_mixture(calls, module, own, arguments, self._split)
            return calls.call(module, own, *arguments)

    def load(self, others: Sequence[Collectives]) -> Mapping[str, ExpertLoad]:
        """Return by name how the tokens of each mixture were shared out; each rank must call.

        Args:
            others: Groups of further ranks that count: with the same experts, with other stages.
        """
        own = {name: (one.load, one.mixture.num_experts) for name, one in self._calls.items()}
        return loads_of_ranks(own, self._split.group, others)

    def restore(self) -> None:
        """Give the mixtures their own forwards back."""
        for module in self._changed:
            _, inner = vars(module).pop(_PLACE)
            set_view(module, inner)
            give_class_back(module, (_Mixing, _OneOfMany, _Inner))
        self._changed = []


class _Mixing:
    """A mixture whose experts are on several ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shared, calls = vars(self)[_PLACE][0]
        own = super().forward  # type: ignore[misc]
        return shared.run(calls, self, own, (args, kwargs))


class _OneOfMany:
    """An expert of a list."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls, number = vars(self)[_PLACE][0]
        return calls.expert_called(number, self, super().forward, args, kwargs)  # type: ignore[misc]


class _Inner:
    """A module inside of an expert."""
