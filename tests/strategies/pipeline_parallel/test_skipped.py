"""A training step that returns None leaves its samples out, before the network or after it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.parity import ignoring
from tests.strategies.stacks import PIPELINES, Stack, pipeline, trainer_of

pytestmark = ignoring(".*`training_step` returned `None`")


def fit(style: type[Stack], strategy: Any = "auto") -> Stack:
    torch.manual_seed(0)
    model = style()
    trainer_of(strategy).fit(model)
    return model


class SkipsBefore(Stack):
    """Whole batches, the first among them, are skipped before the network is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx in (0, 3) else self.loss(batch)


class SkipsAfter(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx in (0, 3) else {"loss": loss}


class SkipsAll(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None


class LeavesOut(Stack):
    """Samples whose first feature is large are left out, and a batch that has no others."""

    is_late = False

    def loss(self, batch: Any) -> Any:
        taken = batch[0][:, 0] < 0.3
        if not self.is_late and not taken.any():
            return None
        scores = self(batch[0])
        if not taken.any():
            return None
        return torch.nn.functional.cross_entropy(scores[taken], batch[1][taken])


class LeavesOutLate(LeavesOut):
    is_late = True


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", [SkipsBefore, SkipsAfter, SkipsAll])
def test_a_batch_without_a_loss_is_skipped(
    style: type[Stack], num_ranks: int, schedule: str
) -> None:
    alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule))
    torch.testing.assert_close(staged.state_dict(), alone.state_dict(), rtol=1e-5, atol=2e-7)
    assert staged.trainer.global_step == alone.trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", [LeavesOut, LeavesOutLate])
def test_microbatches_without_a_loss_are_left_out_of_the_mean(
    style: type[Stack], num_ranks: int, schedule: str
) -> None:
    """With a sample in each microbatch, the mean is over the samples that are taken."""
    alone = fit(style)
    staged = fit(style, pipeline(num_ranks, schedule, num_microbatches=12))
    torch.testing.assert_close(staged.state_dict(), alone.state_dict(), rtol=1e-5, atol=2e-7)
