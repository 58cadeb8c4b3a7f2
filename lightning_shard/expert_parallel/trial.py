"""A trial of whether a mixture computes the same with its experts on several ranks.

    whole    all experts, brought together for the trial    this rank's tokens ──> result, gradients
    shared   experts on their ranks                         this rank's tokens ──> the same

Compared are the results, the gradients of tokens and routing, and those of the experts, which are
the mean over the ranks. A router whose gradient is wrong shows here, where the loss is right. The
first call of each class of mixtures is tried, and leaves the mixture as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import unobserved
from lightning_shard.data_parallel.units import class_name
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.finding import Mixture
from lightning_shard.expert_parallel.full_weights import standing_in
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.tensor_parallel.compared_calls import (
    Arguments,
    Called,
    agreed_difference,
    as_it_was,
    explained,
    in_double,
)

Forward = Callable[..., Any]


class Calls(Protocol):
    """The calls of a mixture; see `BatchedExperts` and `ListedExperts`."""

    anchor: Tensor

    @property
    def mixture(self) -> Mixture:
        """The experts."""

    def whole(self, module: nn.Module, own: Forward) -> Forward:
        """Return the call of a module that has all experts."""

    def call(self, module: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any) -> Any:
        """Call a module with this rank's tokens; each rank must call."""


def try_mixture(
    calls: Calls, module: nn.Module, own: Forward, arguments: Arguments, split: ExpertSplit
) -> None:
    """Call a mixture with all experts and with those of its ranks, and compare; each must call.

    Args:
        calls: The calls of the mixture.
        module: The mixture, whose parameters are here.
        own: Its own forward.
        arguments: What it is called with.
        split: How experts are split over the ranks.

    Raises:
        ConfigError: A result or a gradient differs; raised on every rank.
    """
    named = dict(module.named_parameters())
    experts = {name: one for name, one in named.items() if split.groups_of(one)}
    others = {n: one for n, one in named.items() if n not in experts and one.requires_grad}
    here = [n for n, one in experts.items() if split.is_here(one) and one.requires_grad]
    compared = partial(_compared, calls, module, own, arguments, split, experts, others)
    with unobserved():
        found = agreed_difference(split.group, compared, [*others, *here])
    if found is not None:
        raise ConfigError(
            f"Rank {split.group.rank}: the mixture {calls.mixture.name!r} ({class_name(module)}) "
            f"computes something else with its {calls.mixture.num_experts} experts on "
            f"{split.group.size} ranks than with all on one: {found}. Expected equal "
            f"results, so nothing was trained. Leave expert_parallel_size out, and use "
            f"zero_stage=3 to share out parameters; please report the forward of the mixture."
        )


def _compared(
    calls: Calls,
    module: nn.Module,
    own: Forward,
    arguments: Arguments,
    split: ExpertSplit,
    experts: Mapping[str, nn.Parameter],
    others: Mapping[str, nn.Parameter],
    double: bool,
) -> tuple[Called, Called]:
    """Return the calls with all experts, and with those of each rank."""
    whole_call, failing = calls.whole(module, own), partial(_fails_shared, calls, module, split)
    full = {n: split.full(one, split.like(one)) for n, one in experts.items()}
    local = {n: one.data.clone() for n, one in experts.items()}
    trained = [n for n, one in experts.items() if one.requires_grad]
    with in_double(module, double=double) as copied:
        rest = [*map(copied, others.values())]
        leaves = {n: _leaf(copied(one), experts[n]) for n, one in full.items()}
        with as_it_was(module), _in_place(module, leaves):
            whole = Called(
                lambda given: whole_call(*given[0], **given[1]),
                arguments,
                [*rest, *(leaves[n] for n in trained)],
                double=double,
            )
        leaves = {n: standing_in(_leaf(copied(one), experts[n])) for n, one in local.items()}
        with as_it_was(module), _in_place(module, leaves), explained(failing):
            shared = Called(
                lambda given: calls.call(module, own, *given),
                arguments,
                [*rest, *(leaves[n] for n in trained if split.is_here(experts[n])), calls.anchor],
                double=double,
            )
    _take_mean(whole, len(others), {n: experts[n] for n in trained}, split)
    return whole, shared


def _fails_shared(calls: Calls, module: nn.Module, split: ExpertSplit, error: str) -> str:
    return (
        f"Rank {split.group.rank}: the mixture {calls.mixture.name!r} ({class_name(module)}) "
        f"runs with all experts on one rank, but not with its {calls.mixture.num_experts} "
        f"experts on {split.group.size} ranks ({error}); expected that it calls its experts and "
        f"reads nothing of them. Leave expert_parallel_size out, and use zero_stage=3 to share "
        f"out parameters."
    )


def _leaf(value: Tensor, param: nn.Parameter) -> Tensor:
    return value.detach().requires_grad_(param.requires_grad and torch.is_grad_enabled())


def _take_mean(
    whole: Called, num_others: int, experts: Mapping[str, nn.Parameter], split: ExpertSplit
) -> None:
    """Let the experts' gradients be the mean over the ranks, of those that are here."""
    first = whole.num_sources + num_others
    means = []
    for param, grad in zip(experts.values(), whole.gradients[first:], strict=False):
        split.group.all_reduce(grad)
        if split.is_here(param):
            means.append(split.local(param, grad / split.group.size))
    whole.gradients[first:] = means


@contextmanager
def _in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors stand for parameters inside, whose own values nobody touches."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            parent, _, name = path.rpartition(".")
            held = module.get_submodule(parent).__dict__["_parameters"]
            places.append((held, name, held[name]))
            held[name] = tensor
        yield
    finally:
        for held, name, param in places:
            held[name] = param
