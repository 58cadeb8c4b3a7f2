"""Steps that use parameters on another stage than their own equal a single device's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_shard import HybridParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import PIPELINES, WIDTH, Stack, fit, pipeline

pytestmark = ignoring(
    "A step uses .* parameters outside of their stage", ".* microbatches are fewer than the"
)


class UsedAfterwards(Stack):
    """A module that is registered before the blocks, and so on the first stage, is used after."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


class CalledAfterwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight.T)[:, :3]


class PenaltyOfWeights(Stack):
    """The loss is computed from a parameter that the last stage does not have."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.embed.weight.square().sum()


class PenaltyOfBlock(Stack):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[0].layer.weight.square().sum()


class WritesInPlace(Stack):
    """A value of another stage goes into a tensor that looks known."""

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.zeros(len(x), WIDTH)
        padded[:, :] = self.embed(x)
        x = padded
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AsksForElements(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.embed.weight.sum() > 0:
            x = 2 * x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LogsAnotherStage(Stack):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("norm", self.embed.weight.norm())
        return loss


class PenaltyOfAll(Stack):
    """The usual penalty, by hand; a parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].layer.bias.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class NormRegisteredFirst(Stack):
    """The last norm is registered before the blocks, a batch norm that keeps statistics too."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.head
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    val_dataloader = Stack.train_dataloader


class TableRegisteredLast(Stack):
    """What the blocks are called with is registered after them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) + self.shift(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


STYLES = [
    *(UsedAfterwards, CalledAfterwards, PenaltyOfWeights, PenaltyOfBlock, WritesInPlace),
    *(AsksForElements, LogsAnotherStage, PenaltyOfAll, NormRegisteredFirst, TableRegisteredLast),
]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", STYLES)
def test_a_parameter_of_another_stage_trains_as_on_one_device(
    style: type[Stack], num_ranks: int, schedule: str
) -> None:
    """A parameter of another stage was refused."""
    alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)
    logged, expected = staged.trainer.callback_metrics, alone.trainer.callback_metrics
    torch.testing.assert_close(logged, expected, rtol=1e-5, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_with_layers_in_parts_and_other_copies_too(zero_stage: int) -> None:
    strategy = HybridParallelStrategy(
        backend="in_process",
        num_ranks=4,
        pipeline_parallel_size=2,
        tensor_parallel_size=1 if zero_stage == 3 else 2,
        zero_stage=zero_stage,
        plan={"embed": "colwise_gather_output"},
    )
    alone, staged = fit(PenaltyOfWeights), fit(PenaltyOfWeights, strategy)
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


class CountsWhatItSaw(Stack):
    """Logs, counts and keeps what a step has seen before its loss asks for another stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = MulticlassAccuracy(num_classes=3, average="micro")
        self.seen = SumMetric()
        self.kept: list[Tensor] = []
        self.num_steps = 0

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("plain", loss, on_step=True, on_epoch=True)
        self.hits(logits, batch[1])
        self.seen.update(len(batch[1]))
        self.kept.append(loss.detach())
        self.num_steps += 1
        return self.with_penalty(loss)

    def with_penalty(self, loss: Tensor) -> Tensor:
        return loss + 0.1 * self.embed.weight.square().sum()  # a placeholder is returned

    def on_train_epoch_end(self) -> None:
        self.log("hits", self.hits.compute())
        self.log("seen", self.seen.compute())
        self.log("num_kept", float(len(self.kept)))


class AsksWithinTheStep(CountsWhatItSaw):
    def with_penalty(self, loss: Tensor) -> Tensor:
        return loss + 0.1 * self.embed.weight.square().sum().item()  # it raises within the step


@pytest.mark.parametrize("style", [CountsWhatItSaw, AsksWithinTheStep])
def test_a_step_that_is_run_again_with_what_it_asked_for_counts_once(style: type[Stack]) -> None:
    """The first microbatch was logged twice, and counted twice by torchmetrics."""
    strategy = pipeline(2, "1f1b", num_microbatches=4)
    alone, staged = fit(style, max_epochs=1), fit(style, strategy, max_epochs=1)
    logged, expected = staged.trainer.callback_metrics, alone.trainer.callback_metrics
    torch.testing.assert_close(logged, expected, rtol=1e-5, atol=2e-7)
    assert staged.model.num_steps == alone.model.num_steps


def test_it_is_said_how_much_is_lent() -> None:
    with pytest.warns(UserWarning, match=r"uses 1 parameters .*'?embed.weight.*: 32 values are"):
        fit(PenaltyOfWeights, pipeline(2, "1f1b"), max_epochs=1)


class FirstToEveryBlock(Stack):
    """Every block gets what the embedding makes, whose weight training borrows for a penalty."""

    class block(nn.Module):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, first: Tensor) -> Tensor:
            return x + torch.tanh(self.layer(x) + first)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(one.square().sum() for one in self.embed.parameters())
        return self.loss(batch) + 0.1 * penalty

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    val_dataloader = Stack.train_dataloader


def test_a_validation_before_a_fit_s_steps_borrow_is_learnt_anew() -> None:
    """The next validation was refused: it was sent what the sanity check had not had there."""
    alone = fit(FirstToEveryBlock, num_sanity_val_steps=1)
    staged = fit(FirstToEveryBlock, pipeline(2, "1f1b"), num_sanity_val_steps=1)
    torch.testing.assert_close(staged.weights, alone.weights)
    torch.testing.assert_close(
        dict(staged.trainer.callback_metrics), dict(alone.trainer.callback_metrics)
    )
