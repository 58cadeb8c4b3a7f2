"""Parameters that a hook puts on one memory: equal while nobody changes them, else refused."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.data_parallel.memory.adoption import Ties
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import fit

pytestmark = ignoring(".*microbatches are fewer than the")


def transposed(one: Any, other: Any) -> None:
    one.weight.data = other.weight.data.t()


def the_same(one: Any, other: Any) -> None:
    one.weight.data = other.weight.data


def a_row(one: Any, other: Any) -> None:
    one.bias.data = other.weight.data[0]


def frozen(one: Any, other: Any) -> None:
    one.weight.requires_grad_(False)
    other.weight.requires_grad_(False)
    transposed(one, other)


def a_copy(one: Any, other: Any) -> None:
    one.weight.data = other.weight.data.clone()


def columns_of_one(one: Any, other: Any) -> None:
    both = torch.cat([one.weight.data, other.weight.data], 1) * 0.9
    one.weight.data, other.weight.data = both.chunk(2, 1)


def swapped(one: Any, other: Any) -> None:
    one.weight.data, other.weight.data = other.weight.data, one.weight.data


Way = Callable[[Any, Any], None]
HOOKS = ["on_fit_start", "on_train_batch_end", "on_before_optimizer_step"]


@cache
def style(way: Way, hook: str) -> type[OfRanks]:
    def run(self: Any, *_: Any) -> None:
        way(self.blocks[0].layer, self.blocks[1].layer)

    return type(f"{way.__name__}_in_{hook}", (OfRanks,), {hook: run})


alone: Any = cache(fit)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", [transposed, the_same, a_row])
def test_trained_parameters_that_a_hook_has_tied_are_refused(
    way: Way, hook: str, scheme: str
) -> None:
    """Trained parameters that a hook had tied came apart without a word."""
    num_ranks, make = SCHEMES[scheme]
    with pytest.raises(ConfigError, match=r"'blocks\.[01]\.layer.*were put on one memory"):
        fit(style(way, hook), make(), devices=num_ranks)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end"])
@pytest.mark.parametrize("way", [frozen, a_copy, columns_of_one, swapped])
def test_what_shares_no_memory_or_is_never_changed_trains_on(
    way: Way, hook: str, scheme: str
) -> None:
    num_ranks, make = SCHEMES[scheme]
    made = style(way, hook)
    got = fit(made, make(), devices=num_ranks)
    torch.testing.assert_close(got.weights, alone(made).weights, rtol=1e-5, atol=2e-6)


def full(model: nn.Module) -> Callable[..., list[tuple[nn.Parameter, Tensor]]]:
    return lambda **_: [(param, param.data) for param in model.parameters()]


def test_a_view_stands_for_its_elements_only() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 3)]).requires_grad_(False)
    one, other = model[0].weight, model[1].weight
    ties = Ties(model, 0)
    ties.note_shown([(one, other.data[:2].t().contiguous()), (other, other.data)])
    ties.renew(set())
    assert not ties.are_any  # contiguous() has copied
    ties.note_shown([(one, other.data.t()), (other, other.data)])
    ties.renew(set())
    one.data = other.data.t().clone()
    ties.check(full(model), {})
    other.data[0, 0] += 1
    with pytest.raises(ConfigError, match=r"the parameters '[01].weight' and '[01].weight'"):
        ties.check(full(model), {})
    ties.renew({one})
    assert not ties.are_any
