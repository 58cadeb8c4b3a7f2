"""Hooks that a step with manual optimization calls see weights as hooks between the steps do."""

from typing import Any

import pytest
import torch

from lightning_shard import HybridParallelStrategy
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.stacks import Stack, fit

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]


class ByHand(Stack):
    """Adds weights to gradients in the hook before an update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.add_(param.detach(), alpha=0.1)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_split_layers_are_full_in_hooks_of_a_step(stage: int) -> None:
    """On some ranks they were parts, so that ranks waited for each other in other calls."""
    strategy = HybridParallelStrategy(
        backend="in_process",
        tensor_parallel_size=2,
        zero_stage=stage,
        plan={"blocks.*.layer": "colwise_gather_output"},
    )
    got, alone = fit(ByHand, strategy, devices=4), fit(ByHand)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-5, atol=2e-7)
