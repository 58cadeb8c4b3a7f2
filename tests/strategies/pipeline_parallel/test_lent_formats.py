"""Steps and hooks of stages in mixed formats read, lend and edit weights as one device does."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_shard import HybridParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import WIDTH, Fitted, Stack, fit

pytestmark = ignoring(
    "A step uses .* parameters outside of their stage", ".* microbatches are fewer than the"
)

FORMATS = ["bf16-mixed", "16-mixed"]


class Penalty(Stack):
    def params(self) -> Any:
        return self.parameters()

    def loss(self, batch: Any) -> Tensor:
        penalty: Any = sum(param.pow(2).sum() for param in self.params())
        return super().loss(batch) + 0.01 * penalty


class PenaltyOfKept(Penalty):
    """The list of parameters is made before there are stages."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.parameters())

    def params(self) -> Any:
        return self.kept


class UsesWeights(Stack):
    """Weights of the first stage are functions of the last one's step, in autocast and not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + (x @ self.embed.weight)[:, :3]

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        weight = self.blocks[0].layer.weight
        with torch.autocast("cpu", enabled=False):
            return loss.float() + 0.1 * (weight @ weight.T).pow(2).mean()


class Tied(Stack):
    """A layer after the blocks has the weight of the one before them."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(4, WIDTH)
        self.back.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        first = x
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.back(first))


class TiedBlocks(Penalty):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].layer.weight = self.blocks[0].layer.weight


class Reads(Stack):
    """Hooks read weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(sum(float(param.detach().double().sum()) for param in self.parameters()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            assert param.dtype == param.grad.dtype == torch.float32
            self.seen += [float(param.detach().norm()), float(param.grad.norm())]


class Edits(Stack):
    """Hooks clamp, average and load weights."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.embed).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for param in self.blocks.parameters():
            param.clamp_(-0.3, 0.3)
        for mean, param in zip(self.teacher.parameters(), self.embed.parameters(), strict=True):
            mean.mul_(0.9).add_(param, alpha=0.1)
        if batch_idx == 0:
            self.earlier = {name: value.clone() for name, value in self.state_dict().items()}
        if batch_idx == 1:
            self.load_state_dict(self.earlier)


USES = [Penalty, PenaltyOfKept, UsesWeights, Tied, TiedBlocks]
HOOKS = [Reads, Edits]


def hybrid(zero_stage: int) -> HybridParallelStrategy:
    return HybridParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, zero_stage=zero_stage
    )


def fit_in(precision: str, style: type[Stack], strategy: Any = "auto") -> Fitted:
    """Fit in a format; Lightning itself takes the plugin of 16 bits for bf16 on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision(precision, "cpu", scaler if precision == "16-mixed" else None)  # type: ignore[arg-type]
    return fit(style, strategy, plugins=[plugin], max_steps=3)


def check_in(precision: str, style: type[Stack], zero_stage: int) -> None:
    """Ranks are as close to float32 as one device in the format."""
    exact, alone = fit(style, max_steps=3), fit_in(precision, style)
    staged = fit_in(precision, style, hybrid(zero_stage))
    for name, expected in exact.weights.items():
        rounding = (alone.weights[name] - expected).abs().max()
        torch.testing.assert_close(
            staged.weights[name], alone.weights[name], rtol=0, atol=float(4 * rounding) + 1e-3
        )
    if isinstance(exact.model, Reads):
        torch.testing.assert_close(
            torch.tensor(staged.model.seen), torch.tensor(alone.model.seen), rtol=2e-2, atol=2e-2
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("style", USES)
def test_what_is_lent_has_the_format_that_user_code_sees(
    style: type[Stack], precision: str
) -> None:
    """Under stage 3 an owner sent its block's rounded values, where others awaited fp32."""
    check_in(precision, style, zero_stage=3)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("style", [*USES, *HOOKS])
def test_stages_below_are_of_one_device_in_mixed_formats(
    style: type[Stack], zero_stage: int, precision: str
) -> None:
    check_in(precision, style, zero_stage)


class UsesBetweenTheBits(Stack):
    """A step reads weights of another stage that 16 bits would round."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []
        nn.init.constant_(self.blocks[0].layer.weight, 1 + 2.0**-12)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        weight = self.blocks[0].layer.weight
        assert weight.dtype == torch.float32
        self.log("of the weight", weight.double().sum(), on_step=True, on_epoch=False)
        return loss + 2.0**-14 * weight.double().sum().float()

    def configure_optimizers(self) -> Any:
        own = [self.blocks[0].layer.weight]
        return torch.optim.SGD(own, lr=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", FORMATS)
def test_what_is_lent_is_not_rounded(precision: str) -> None:
    staged = fit_in(precision, UsesBetweenTheBits, hybrid(3))
    assert staged.trainer.callback_metrics["of the weight"] == WIDTH**2 * (1 + 2.0**-12)
