"""What hooks compute with weights has a graph, whose gradients are a single device's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.decoders import WIDTH, WITHOUT_STAGES, Decoder, assert_as_alone
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)
SCHEMES = [*WITHOUT_STAGES, "pipeline", "2x2x2"]
INPUT = torch.ones(2, 4, WIDTH, dtype=torch.float64)


class Penalises(Decoder):
    """A penalty of all weights that is added after the backward of the loss."""

    def penalty(self) -> Tensor:
        return 0.05 * sum(one.square().sum() for one in self.parameters())  # type: ignore[return-value]

    def on_after_backward(self) -> None:
        self.penalty().backward()


class OfNorms(Penalises):
    def penalty(self) -> Tensor:
        return 0.05 * sum(one.norm() for one in self.parameters())  # type: ignore[return-value]


class OfRowsAndProducts(Penalises):
    """A penalty of some weights, of which others have no gradient."""

    def penalty(self) -> Tensor:
        first, second = self.blocks
        row: Tensor = first.up.weight[2].square().sum()  # type: ignore[union-attr, index]
        product: Tensor = second.up.weight @ second.down.weight  # type: ignore[union-attr, operator]
        return 0.1 * (row + product.square().mean())


class OfLayers(Penalises):
    """A penalty of what a layer computes, and of the layer's weights."""

    def penalty(self) -> Tensor:
        block = self.blocks[0]
        weights = sum(one.square().sum() for one in block.parameters())
        return 0.1 * block(INPUT).square().mean() + 0.05 * weights


class BeforeTheUpdate(Penalises):
    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.penalty().backward()


class OfLayersBeforeTheUpdate(BeforeTheUpdate, OfLayers):
    pass


class WithAHookOfGradients(Penalises):
    """A parameter's own hook scales what comes to it."""

    def on_fit_start(self) -> None:
        self.head.weight.register_hook(lambda grad: 0.5 * grad)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "style",
    [
        Penalises,
        OfNorms,
        OfRowsAndProducts,
        OfLayers,
        BeforeTheUpdate,
        OfLayersBeforeTheUpdate,
        WithAHookOfGradients,
    ],
)
def test_a_backward_that_a_hook_begins_reaches_weights(style: type[Decoder], scheme: str) -> None:
    """What hooks read had no graph under stage 3, and gradients of split layers were lost."""
    assert_as_alone(style, scheme)


class ScalesByWeights(Decoder):
    """A backward of the user's that reads weights."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        norms = sum(one.norm() for one in self.parameters())
        (loss * (1 + 0.1 * norms.detach()) + 0.1 * norms).backward()  # type: ignore[union-attr]


class ReadsInABackward(Decoder):
    """What runs in the backward reads weights of other blocks, and makes a product with one."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x.requires_grad:
            x.register_hook(self.changed)
        return self.norm(self.blocks[1](x))

    def changed(self, grad: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        return grad * (1 + block.up.weight.norm().detach()) + grad @ block.attention.q.weight


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
@pytest.mark.parametrize("style", [ScalesByWeights, ReadsInABackward])
def test_a_backward_reads_full_weights(style: type[Decoder], scheme: str) -> None:
    """Under stage 3 code in a backward read a rank's part of a weight."""
    assert_as_alone(style, scheme)
