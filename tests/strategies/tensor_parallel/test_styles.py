"""Styles of Lightning training under tensor parallel, each against a single device."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_shard import TensorParallelStrategy
from tests.strategies import styles
from tests.strategies.parity import ignoring
from tests.strategies.styles import (
    AUTOMATIC,
    MANUAL,
    Adversarial,
    Automatic,
    check,
    fit_twice,
    train,
)
from tests.strategies.test_training_styles import Copies, ModuleZeroGrad, WassersteinCritic
from tests.trainers import rank_loader

pytestmark = ignoring()

NETS = ("net", "critic")


def plan_of(style: type[Automatic]) -> dict[str, str]:
    """Each network begins and ends with half a pair; its blocks are gathered and split."""
    plan = {}
    for net in NETS[: 2 if issubclass(style, Adversarial) else 1]:
        plan[f"{net}.embed"] = "colwise_gather_output"
        plan[f"{net}.blocks.*.layer"] = "colwise_gather_output"
        plan[f"{net}.head"] = "rowwise_split_input"
    return plan


def batches(model: Automatic, num: int) -> Any:
    """Return what `Automatic.batches` does, by data-parallel ranks."""
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(num * styles.GLOBAL_BATCH, 4, generator=generator))
    return rank_loader(model.trainer, dataset, styles.GLOBAL_BATCH)


@pytest.fixture(autouse=True)
def by_data_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Automatic, "batches", batches)


def ranks(style: type[Automatic], num_ranks: int, stage: int) -> TensorParallelStrategy:
    strategy = TensorParallelStrategy(
        backend="in_process",
        num_ranks=num_ranks,
        tensor_parallel_size=2,
        plan=plan_of(style),
        zero_stage=stage,
    )
    strategy.run.options.__dict__["bucket_mb"] = 1e-4
    return strategy


STYLES = [*AUTOMATIC, *MANUAL, Copies, ModuleZeroGrad, WassersteinCritic]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("style", STYLES)
def test_styles(style: type[Automatic]) -> None:
    check(style, ranks(style, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "stage"),
    # under stage 3 a copy is one of shards
    [(style, stage) for style in STYLES for stage in (0, 1, 3) if (style, stage) != (Copies, 3)],
)
def test_styles_with_data_parallel(style: type[Automatic], stage: int) -> None:
    check(style, ranks(style, 4, stage))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_fits_of_one_module(num_ranks: int) -> None:
    got = fit_twice(lambda: ranks(Automatic, num_ranks, 0))
    torch.testing.assert_close(got, fit_twice(lambda: "auto"), rtol=1e-4, atol=1e-6)


def test_a_module_copied_after_a_fit_is_an_ordinary_one() -> None:
    copied = copy.deepcopy(train(Automatic, ranks(Automatic, 2, 0)))
    assert {type(module) for module in copied.net.blocks.modules()} == {
        nn.ModuleList,
        styles.Block,
        nn.LayerNorm,
        nn.Linear,
    }
