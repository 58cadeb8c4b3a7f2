"""Parameters that only a later step gives a gradient, whose state is then younger than others'."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.offload.places import PLACES, WARNINGS, offloaded
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import WIDTH, fit

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}") for message in (*WARNINGS, *UPSTREAM_WARNINGS)
]


class UsedLate(OfRanks):
    """The first batch does without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return (
            loss if batch_idx % 2 == 0 else loss + self.late(self.embed(batch[0])).square().mean()
        )


class Adaptive(UsedLate):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("style", [UsedLate, Adaptive])
def test_a_momentum_may_begin_later_on_the_host(style: Any, place: str) -> None:
    """SGD's fused kernel takes momenta of all parameters, or of none."""
    alone, staged = fit(style), fit(style, offloaded(place))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)
