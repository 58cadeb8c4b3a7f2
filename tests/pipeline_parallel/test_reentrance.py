"""Reentrant checkpoints of activations in a pipeline's stages."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.stacks import PIPELINES, Block, Stack, fit, pipeline

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Inside(Stack):
    block = CheckpointedBlock


class Around(Stack):
    """The checkpoint is around the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", [Inside, Around])
def test_a_reentrant_checkpoint_could_not_give_the_gradients_of_a_stage(
    style: Any, num_ranks: int, schedule: str
) -> None:
    alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


def test_outside_of_a_stage_a_checkpoint_is_as_reentrant_as_it_was() -> None:
    fit(Inside, pipeline(2, "1f1b"), max_epochs=1)
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(torch.exp, x, use_reentrant=True)
    assert type(y.grad_fn).__name__.endswith("CheckpointFunctionBackward")
