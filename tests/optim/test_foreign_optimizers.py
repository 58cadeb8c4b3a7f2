"""Before a fit it is known of other packages' optimizers whether they may step on shards."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_shard import ConfigError
from lightning_shard.optim.elementwise import why_not_elementwise, why_not_separate
from tests.optim.foreign_optimizers import (
    BY_ELEMENT,
    BY_PARAMETER,
    OF_ALL,
    Lookahead,
    Make,
    OfOneName,
)
from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import fit

pytestmark = ignoring()


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_who_goes_element_by_element_may_step_on_shards(name: str) -> None:
    """One that needs `train()` first, and one around another, were refused for their copy."""
    assert why_not_elementwise(BY_ELEMENT[name](params())) is None


@pytest.mark.parametrize("name", BY_PARAMETER)
def test_who_goes_parameter_by_parameter_needs_full_ones(name: str) -> None:
    assert why_not_elementwise(BY_PARAMETER[name](params())) is not None
    assert why_not_separate(BY_PARAMETER[name](params())) is None


@pytest.mark.parametrize("name", OF_ALL)
def test_who_reads_all_parameters_is_found_in_tiny_steps(name: str) -> None:
    """Steps of 1e-8 looked equal, and what the group keeps was not compared."""
    assert why_not_elementwise(OF_ALL[name](params())) is not None
    assert why_not_separate(OF_ALL[name](params())) is not None


def test_a_trial_of_a_wrapper_leaves_the_optimizer_that_trains() -> None:
    """A trial of a wrapper stepped the optimizer that trains."""
    trained = params()
    inner = SGD(trained, lr=0.1)
    for param in trained:
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in trained]
    assert why_not_elementwise(Lookahead(inner)) is None
    torch.testing.assert_close([param.detach() for param in trained], before, rtol=0, atol=0)
    assert not inner.state


def style_with(make: Make) -> type[OfRanks]:
    class WithOptimizer(OfRanks):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    return WithOptimizer


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["zero2", "pipeline", "zero1", "zero3", "tensor"])
@pytest.mark.parametrize("name", OF_ALL)
def test_who_reads_all_parameters_is_refused_before_anything_trains(name: str, scheme: str) -> None:
    """D-Adaptation was refused at its step 33, or trained at another rate on each rank."""
    num_ranks, make = SCHEMES[scheme]
    with pytest.raises(ConfigError, match=r"does not update each (element|parameter) by itself"):
        fit(style_with(OF_ALL[name]), make(), devices=num_ranks, max_epochs=1)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero2", "pipeline", "zero1", "zero3", "tensor"])
@pytest.mark.parametrize("name", ["Lion", "SPAM", "Sophia", "LAMB", "Adafactor", "CAME"])
def test_others_train_as_on_one_device(name: str, scheme: str) -> None:
    num_ranks, make = SCHEMES[scheme]
    style = style_with((BY_ELEMENT | BY_PARAMETER)[name])
    got = fit(style, make(), devices=num_ranks, max_epochs=1)
    torch.testing.assert_close(got.weights, fit(style, max_epochs=1).weights, rtol=1e-4, atol=1e-5)


def test_a_copy_that_cannot_step_is_the_reason_that_is_given() -> None:
    """It was said that the optimizer does not update each element by itself."""
    style = style_with(lambda params: OfOneName(params, name="mine"))
    with pytest.raises(ConfigError, match=r"OfOneName could not be tried on a small matrix"):
        fit(style, SCHEMES["zero2"][1](), devices=2, max_epochs=1)
