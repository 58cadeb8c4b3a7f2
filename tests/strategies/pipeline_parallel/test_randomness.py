"""Random numbers of a step: the same on every stage, but those that a stage's blocks draw."""

from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.strategies.parity import ignoring
from tests.strategies.pipeline_parallel.test_styles import Checkpointed
from tests.strategies.stacks import (
    ALL_PIPELINES,
    NUM_BATCHES,
    PIPELINES,
    WIDTH,
    Block,
    OfEveryRank,
    Stack,
    fit,
    fit_with,
    pipeline,
)

pytestmark = ignoring(".* microbatches are fewer than the")


class Noisy(Stack):
    """Noise and a time for each sample, drawn in the step, which is also the target."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return super().forward(x + time)

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[tuple[float, float]] = deque()  # what lists hold is shared by stages

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise, time = torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1)
        self.seen.append((noise.sum().item(), time.sum().item()))
        x = self.embed(batch[0] + noise)
        for block in self.blocks:
            x = block(x, time)
        return F.mse_loss(self.head(x), noise[:, :3] * time)


@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
def test_a_step_draws_the_same_on_every_stage(num_ranks: int, schedule: str) -> None:
    gather = OfEveryRank()
    fit_with(Noisy, gather, num_ranks, schedule, max_epochs=1)
    drawn = [set(rank) for rank in gather.ranks]
    assert all(one == drawn[0] for one in drawn)
    assert len(drawn[0]) == NUM_BATCHES * 2 * num_ranks  # differs between microbatches


class Dropping(Stack):
    """Keeps the random numbers that its blocks draw."""

    class block(Block):  # noqa: D106, N801
        seen: deque[tuple[float, ...]]

        def forward(self, x: Tensor) -> Tensor:
            kept = F.dropout(torch.ones(64), 0.5)
            if not x.is_meta and type(x) is Tensor:
                self.seen.append(tuple(kept.tolist()))
            return super().forward(x) * kept[:WIDTH]

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[tuple[float, ...]] = deque()
        for block in self.blocks:
            block.__dict__["seen"] = self.seen


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_stages_draw_their_own_dropout(num_ranks: int, schedule: str) -> None:
    """Each draws of its own, in every microbatch."""
    gather = OfEveryRank()
    fit_with(Dropping, gather, num_ranks, schedule, max_epochs=1)
    drawn = [one for rank in gather.ranks for one in rank]
    microbatches = NUM_BATCHES * 2 * num_ranks
    assert len(drawn) == 4 * microbatches
    assert len(set(drawn)) == len(drawn)


class CheckpointedDropout(Checkpointed):
    """What is computed again has to draw the same again."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


class PlainDropout(CheckpointedDropout):
    forward = Stack.forward


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_checkpointing_draws_the_same_dropout_again(num_ranks: int, schedule: str) -> None:
    plain = fit(PlainDropout, pipeline(num_ranks, schedule))
    checkpointed = fit(CheckpointedDropout, pipeline(num_ranks, schedule))
    assert plain.curve.losses == checkpointed.curve.losses
    torch.testing.assert_close(plain.weights, checkpointed.weights, rtol=0, atol=0)
