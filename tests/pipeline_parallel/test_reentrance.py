"""Reentrant checkpoints of activations in a pipeline's stages."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.parity import ignoring
from tests.strategies.stacks import PIPELINES, WIDTH, Block, Stack, fit, pipeline

pytestmark = ignoring()


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


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", [Inside, Around])
def test_a_reentrant_checkpoint_gives_the_gradients_of_a_stage(
    style: Any, num_ranks: int, schedule: str
) -> None:
    """A reentrant checkpoint could not give the gradients of a stage."""
    alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


class WithoutStem(Around):
    """The blocks' input asks for no gradient, so that reentrant checkpoints train none of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).detach()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class WithAdvice(nn.Module):
    """A block with a checkpoint inside, of which a dictionary comes back beside the states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tanh(self.layer(x)), {"scale": self.layer(x).sigmoid()}

    def forward(self, x: Tensor) -> Tensor:
        update, advice = checkpoint(self.inner, x, use_reentrant=True)
        return x + update * advice["scale"]


class ThroughDictionary(Stack):
    block = WithAdvice


class FirstBlockFrozen(Inside):
    """The first stage trains the layer before its blocks alone, the second what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", [WithoutStem, ThroughDictionary, FirstBlockFrozen])
def test_what_reentrant_checkpoints_leave_untrained_is_untrained(
    style: Any, num_ranks: int, schedule: str
) -> None:
    """Blocks trained under a pipeline whose input asked for no gradient, unlike on one device.

    A checkpoint that is not reentrant follows the weights inside it, and what is in a dictionary.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


def test_outside_of_a_stage_a_checkpoint_is_as_reentrant_as_it_was() -> None:
    fit(Inside, pipeline(2, "1f1b"), max_epochs=1)
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(torch.exp, x, use_reentrant=True)
    assert type(y.grad_fn).__name__.endswith("CheckpointFunctionBackward")
