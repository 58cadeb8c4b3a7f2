"""Hooks that a step with manual optimization calls see weights as hooks between the steps do."""

from typing import Any

import pytest
import torch

from lightning_shard import HybridParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import Stack, fit

pytestmark = ignoring()


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


@pytest.mark.slow
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


HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Noting(Stack):
    """Notes sums over its weights in each hook of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, list[float]]] = []

    def note(self, place: str, params: Any) -> None:
        sums = [float(param.detach().square().sum()) for param in params]
        self.noted.append((place, sums))


class NotingByHand(Noting):
    """Notes also what it has in the optimizer, in the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        params = optimizer.param_groups[0]["params"]
        self.note("gradients", [param.grad for param in params])
        optimizer.step()
        self.note("groups", params)
        return loss


def _noting(name: str) -> Any:
    def hook(self: Noting, *_: Any) -> None:
        self.note(name, self.parameters())

    return hook


for _name in HOOKS:
    setattr(Noting, _name, _noting(_name))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("style", [Noting, NotingByHand])
def test_weights_that_a_step_leaves_unsharded_were_parts_in_hooks(
    style: type[Noting], stage: int
) -> None:
    """Under stage 3 hooks between a forward and its update saw this rank's part of split layers.

    So did a step that takes parameters from its optimizer, under every stage.
    """
    strategy = HybridParallelStrategy(
        backend="in_process",
        tensor_parallel_size=2,
        zero_stage=stage,
        plan={"blocks.*.layer": "colwise_gather_output", "embed": "colwise_gather_output"},
    )
    got, alone = fit(style, strategy, devices=4), fit(style)
    assert [place for place, _ in got.model.noted] == [place for place, _ in alone.model.noted]
    for (place, sums), (_, expected) in zip(got.model.noted, alone.model.noted, strict=True):
        assert sums == pytest.approx(expected, rel=1e-4, abs=1e-6), place
