"""Logits and activations sharded under unmodified Lightning modules: parity, what steps return."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.strategies.model_parallel import TensorParallelStrategy
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    ignoring,
    quiet_trainer,
    single_device,
    train,
)
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()

HEADS = {"gpt": "head", "llama": "network.lm_head", "gpt2": "network.lm_head"}


def split(model: str, size: int, **options: Any) -> TensorParallelStrategy:
    plan = PLANS[model] | {HEADS[model]: "colwise_logits"}
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=size, plan=plan, **options
    )
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return strategy


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("model", "size"), [("gpt", 4), ("llama", 2), ("gpt2", 4)])
def test_equals_a_single_device(model: str, size: int) -> None:
    run = train(build(model), strategy=split(model, size), devices=size)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", HEADS)
def test_under_zero_3_it_equals_a_single_device(model: str) -> None:
    run = train(build(model), strategy=split(model, 2, zero_stage=3), devices=4)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=2)))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("model", "size"), [("gpt", 4), ("llama", 2), ("gpt2", 2)])
def test_with_sequence_parallel_it_equals_a_single_device(model: str, size: int) -> None:
    run = train(build(model), strategy=split(model, size, sequence_parallel=True), devices=size)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_with_sequence_parallel_and_zero_it_equals_a_single_device(stage: int) -> None:
    strategy = split("llama", 2, sequence_parallel=True, zero_stage=stage)
    run = train(build("llama"), strategy=strategy, devices=4)
    assert_parity(run, single_device(Case(model="llama", strategy="", num_ranks=2)))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_in_bf16_it_trains_as_a_single_device_does(sequence_parallel: bool) -> None:
    alone = train(build("gpt"), precision="bf16-mixed")
    strategy = split("gpt", 2, sequence_parallel=sequence_parallel)
    both = train(build("gpt"), strategy=strategy, devices=2, precision="bf16-mixed")
    torch.testing.assert_close(
        torch.tensor(both.losses), torch.tensor(alone.losses), rtol=5e-3, atol=0
    )


class Predictor(ExampleGPT):
    """Returns logits, which outlive the ranks' step."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"logits": self(batch[0])}


def test_predictions_are_full() -> None:
    torch.manual_seed(7)
    model = Predictor()
    loader = DataLoader(model.data(8), batch_size=4, shuffle=False)
    alone = quiet_trainer().predict(model, loader)
    both = quiet_trainer(strategy=split("gpt", 2), devices=2).predict(model, loader)
    for one, other in zip(alone or [], both or [], strict=True):
        assert type(other["logits"]) is Tensor
        torch.testing.assert_close(other["logits"], one["logits"])
