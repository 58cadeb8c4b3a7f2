"""Ranks that compute something else than the others are told so, before they train on it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import TensorParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()


def fit(model: ExampleGPT, plan: Any = "auto", num_ranks: int = 2, **options: Any) -> None:
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=2, plan=plan, **options
    )
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_steps=2)
    trainer.fit(model, datamodule=GlobalBatches(model, 2))


class Penalised(ExampleGPT):
    def loss(self, batch: Any) -> Tensor:
        parts = [vars(one)["_parameters"].get("weight") for one in self.modules()]
        return super().loss(batch) + 1e-2 * sum(one.norm() for one in parts if one is not None)


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (4, 1)])
def test_a_loss_over_parameters_in_parts_is_refused(num_ranks: int, stage: int) -> None:
    """A loss over parameters in parts was that of the part."""
    with pytest.raises(ConfigError, match=r"ranks \d, \d share every layer and must compute the"):
        fit(Penalised(), PLANS["gpt"], num_ranks, zero_stage=stage)


class Between(nn.Module):
    """A layer with a parameter that works on what each rank has a part of."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.act = layer, nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.act(x))


class Activated(ExampleGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].down = Between(self.blocks[1].down)


PARTIAL = PLANS["gpt"] | {"blocks.1.down.layer": "rowwise", "blocks.0.down": "rowwise"}
PARTIAL |= {"blocks.2.down": "rowwise"}
del PARTIAL["blocks.*.down"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_within_a_region_is_refused(stage: int) -> None:
    """A parameter within a region had another gradient on each rank."""
    with pytest.raises(ConfigError, match=r"same gradient of blocks\.1\.down\.act\.weight, which"):
        fit(Activated(), PARTIAL, 4, zero_stage=stage)


def test_with_its_own_style_it_has_the_same() -> None:
    fit(Activated(), PARTIAL | {"blocks.1.down.act": "replicated_with_grad_allreduce"})


class OfEachRank(ExampleGPT):
    def loss(self, batch: Any) -> Tensor:
        assert self.trainer is not None
        return super().loss(batch) * (1 + self.trainer.strategy.mesh_rank * self.num_given)

    num_given = 1.0


def test_results_are_compared_at_ever_fewer_steps() -> None:
    class Late(OfEachRank):
        @property
        def num_given(self) -> float:  # type: ignore[override]
            return float(self.global_step == 2)

    strategy = TensorParallelStrategy(backend="in_process")
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=4, accumulate_grad_batches=1)
    model = Late()
    with pytest.raises(ConfigError, match="must compute the same loss"):
        trainer.fit(model, datamodule=GlobalBatches(model, 4))
    assert trainer.global_step == 2


def test_an_overflow_is_left_to_the_scaler() -> None:
    class Overflowing(OfEachRank):
        num_given = float("inf")

    fit(Overflowing())


def test_a_plan_without_an_entry_or_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan must be .* patterns and .*, got \{\}"):
        TensorParallelStrategy(backend="in_process", plan={})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must be .* of at least 1"):
        TensorParallelStrategy(backend="in_process", tensor_parallel_size=0)


def test_state_that_an_optimizer_makes_before_training_fits_its_parts() -> None:
    """Adagrad's sums had the shapes of full parameters in the first step."""

    class Summing(ExampleGPT):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=1e-2, eps=1e-4)

    weights = []
    for options in ({}, {"strategy": TensorParallelStrategy(backend="in_process"), "devices": 2}):
        torch.manual_seed(7)
        model = Summing()
        quiet_trainer(max_steps=3, **options).fit(model, datamodule=GlobalBatches(model, 3))
        weights.append(dict(model.state_dict()))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
