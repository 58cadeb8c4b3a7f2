"""Number formats on stages: as close to exact as a single device in that format."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.precision.test_plugins import Scales, _error
from tests.strategies.parity import MANY_STEPS, Case, build, ignoring, single_device, train
from tests.strategies.stacks import (
    BATCH,
    PIPELINES,
    WIDTH,
    Fitted,
    Stack,
    fit,
    pipeline,
    trainer_of,
)

pytestmark = ignoring(".* microbatches are fewer than the")

FORMATS = ["64-true", "bf16-true", "16-true"]


def case_of(model: str, precision: str) -> Case:
    return Case(model=model, strategy="", num_ranks=1, precision=precision, num_steps=MANY_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["bf16-mixed", *(pytest.param(one, marks=pytest.mark.slow) for one in FORMATS)]
)
@pytest.mark.parametrize(
    ("model", "num_ranks", "schedule"),
    [
        ("layers", 2, "zbv"),
        pytest.param("gpt", 2, "1f1b", marks=pytest.mark.slow),
        pytest.param("gpt2_8", 2, "zbv", marks=pytest.mark.slow),
        pytest.param("llama_8", 4, "interleaved_zero_bubble", marks=pytest.mark.slow),
    ],
)
def test_is_as_close_to_float32_as_a_single_device(
    model: str, num_ranks: int, schedule: str, precision: str
) -> None:
    options: Any = {"devices": num_ranks, "precision": precision, "num_steps": MANY_STEPS}
    run = train(build(model), strategy=pipeline(num_ranks, schedule), **options)
    plain = single_device(case_of(model, precision))
    exact = single_device(case_of(model, "32-true"))
    allowed = (1e-5, 1e-5) if precision == "64-true" else _error(plain, exact)
    for error, limit in zip(_error(run, exact), allowed, strict=True):
        assert error <= 3 * limit
    for name, weight in run.weights.items():
        assert weight.dtype == plain.weights[name].dtype


class Overflowing(Stack):
    """Sample 1 makes the gradient of one block overflow at the first loss scale, not at half."""

    at = 0

    class block(nn.Module):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor, total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return x, total + (self.layer(x) * weight).sum(1)

    def loss(self, batch: Any) -> Tensor:
        x, weight = batch
        total = self.embed(x[:, :4]).sum(1) / 1000
        for index, block in enumerate(self.blocks):
            _, total = block(x, total, weight if index == self.at else weight.clamp(max=0.01))
        return total.float().mean() + self.head(x).float().mean() / 1000

    def dataset(self) -> Any:
        weight = torch.full((4 * BATCH, 1), 0.01)
        weight[1] = 16.0
        return TensorDataset(torch.ones(4 * BATCH, WIDTH), weight)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=BATCH)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_scaled(at: int, strategy: Any, clip: float | None) -> tuple[Fitted, Scales]:
    scales = Scales()

    class Overflows(Overflowing):
        def callbacks(self) -> list[L.Callback]:
            return [scales]

    Overflows.at = at
    options: Any = {"max_epochs": 1, "gradient_clip_val": clip}
    plugins = [MixedPrecision("16-mixed", device="cpu")]
    return fit(Overflows, strategy, plugins=plugins, **options), scales


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("clip", [0.05, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_an_overflow_on_one_stage_skips_the_step_on_all(
    num_ranks: int, schedule: str, at: int, clip: float | None
) -> None:
    full, single = fit_scaled(at, "auto", clip)
    staged, ranks = fit_scaled(at, pipeline(num_ranks, schedule), clip)
    assert single.scales == [[32768.0]] * 4  # half of the first one
    assert ranks.scales == [[32768.0] * num_ranks] * 4
    assert ranks.updates == [[float(step)] * num_ranks for step in range(4)]
    torch.testing.assert_close(staged.weights, full.weights, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_sixteen_bits_with_a_scaler_train_as_a_single_device() -> None:
    def fit_half(strategy: Any) -> Fitted:
        return fit(Stack, strategy, plugins=[MixedPrecision("16-mixed", device="cpu")])

    alone, staged, exact = fit_half("auto"), fit_half(pipeline(2, "zbv")), fit(Stack)
    for got, plain, expected in zip(
        staged.curve.losses, alone.curve.losses, exact.curve.losses, strict=True
    ):
        assert abs(got - expected) <= 3 * abs(plain - expected) + 1e-3 * expected
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-2, atol=2e-3)


def test_evaluation_in_a_lower_format() -> None:
    class Predicting(Stack):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        predict_dataloader = Stack.train_dataloader

    torch.manual_seed(0)
    model = Predicting()
    expected = trainer_of(precision="bf16-mixed").predict(model)
    got = trainer_of(pipeline(2, "1f1b"), precision="bf16-mixed").predict(model)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
