"""Number formats under tensor parallel: as close to exact as a single device in that format."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_shard import TensorParallelStrategy
from tests.precision.test_plugins import Overflowing, Scales, _error
from tests.strategies.parity import (
    MANY_STEPS,
    SMALL_BUCKET_MB,
    Case,
    GlobalBatches,
    Run,
    build,
    ignoring,
    quiet_trainer,
    single_device,
    train,
)
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()

MESHES = [(2, 2, 0), (4, 2, 1), (4, 2, 3)]  # ranks, tp, stage
FORMATS = ["64-true", "bf16-true", "bf16-mixed", "16-true"]


def strategy_of(num_ranks: int, size: int, stage: int, plan: Any) -> TensorParallelStrategy:
    strategy = TensorParallelStrategy(
        backend="in_process",
        num_ranks=num_ranks,
        tensor_parallel_size=size,
        plan=plan,
        zero_stage=stage,
    )
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return strategy


def case_of(model: str, precision: str) -> Case:
    return Case(model=model, strategy="", num_ranks=1, precision=precision, num_steps=MANY_STEPS)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize(("num_ranks", "size", "stage"), MESHES)
def test_is_as_close_to_float32_as_a_single_device(
    num_ranks: int, size: int, stage: int, precision: str
) -> None:
    strategy = strategy_of(num_ranks, size, stage, PLANS["gpt"])
    run: Run = train(build("gpt"), strategy=strategy, precision=precision, num_steps=MANY_STEPS)
    plain = single_device(case_of("gpt", precision))
    exact = single_device(case_of("gpt", "32-true"))
    allowed = (1e-5, 1e-5) if precision == "64-true" else _error(plain, exact)
    for error, limit in zip(_error(run, exact), allowed, strict=True):
        assert error <= 3 * limit
    for name, weight in run.weights.items():
        assert weight.dtype == plain.weights[name].dtype


class SplitOverflow(Overflowing):
    """The output that overflows is the last one: it lies on the last rank of a group."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, weight = batch
        big = torch.zeros(8).index_fill_(0, torch.tensor([7]), 1.0)
        own = self.last(x) * (0.01 + (weight - 0.01) * big)
        return self.first(x).mean() / 1000 + own.sum() / len(x)


def _train_scaled(strategy: Any, *, fused: bool, clip: float | None) -> tuple[Any, Scales]:
    torch.manual_seed(7)
    model, scales = SplitOverflow(fused), Scales()
    quiet_trainer(
        strategy=strategy,
        plugins=[MixedPrecision("16-mixed", device="cpu")],
        max_steps=3,
        limit_train_batches=3,
        accumulate_grad_batches=1,
        gradient_clip_val=clip,
        callbacks=[scales],
    ).fit(model, datamodule=GlobalBatches(model, 3))
    return model, scales


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("fused", "clip"), [(False, None), (False, 0.05), (True, None)])
@pytest.mark.parametrize(("num_ranks", "size", "stage"), [(2, 2, 0), (4, 4, 0), (4, 2, 2)])
def test_every_rank_skips_a_step_with_an_overflow(
    num_ranks: int, size: int, stage: int, fused: bool, clip: float | None
) -> None:
    """The parts of one layer then belonged to different steps."""
    plan = {"first": "colwise_gather_output", "last": "colwise_gather_output"}
    full, single = _train_scaled("auto", fused=fused, clip=clip)
    model, ranks = _train_scaled(strategy_of(num_ranks, size, stage, plan), fused=fused, clip=clip)
    assert single.scales == [[32768.0]] * 3
    assert ranks.scales == [[32768.0] * num_ranks] * 3
    assert ranks.updates == [[float(step)] * num_ranks for step in range(3)]
    for got, expected in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
