"""An activation enters a region once, but anew when it has changed or must be saved again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

PLAN = {"first": "rowwise_split_input", "*.up": "colwise", "*.down": "rowwise"}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, between: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(8, 8), Pair(), Pair()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.first(x))


def check(between: Callable[[Model, Tensor], Tensor], *, train: bool = True) -> None:
    """Compare with a single device, with activations in slices of the sequence."""

    def run(model: Model) -> Tensor:
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).double()
        with torch.set_grad_enabled(train):
            loss = model(x).square().mean()
        if train:
            loss.backward()
        return loss.detach()

    def fn(rank: int) -> None:
        torch.manual_seed(0)
        full = Model(between).double()
        torch.manual_seed(0)
        model = Model(between).double()
        layers = match_plan(model, PLAN)
        split = SplitModel(model, layers, all_ranks(), sequence_parallel=True)
        torch.testing.assert_close(run(model), run(full))
        for param, expected in zip(model.parameters(), full.parameters(), strict=True):
            if expected.grad is not None:
                assert param.grad is not None
                torch.testing.assert_close(split.full(param, param.grad), expected.grad)

    run_ranks(fn, 2)


def test_a_checkpoint_that_begins_with_a_split_layer_saves_as_much_the_second_time() -> None:
    """A checkpoint that begins with a split layer saved less the second time."""
    check(lambda model, x: checkpoint(model.one, x, use_reentrant=False))


def test_what_has_entered_before_a_checkpoint_enters_again_within() -> None:
    check(lambda model, x: model.one(x) + checkpoint(model.two, x, use_reentrant=False))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_activation_changed_in_place_is_new_to_the_next_layer(
    mode: type[torch.no_grad],
) -> None:
    """An activation changed in place was still the old one to the next layer."""

    def between(model: Model, x: Tensor) -> Tensor:
        with mode():
            first = model.one(x)
            x += 1
            return first + model.two(x)

    check(between, train=False)
