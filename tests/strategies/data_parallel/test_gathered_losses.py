"""Losses over the samples of all ranks: `self.all_gather(..., sync_grads=True)` in a step."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.contrastive import ContrastiveEncoder, contrastive_loss
from lightning_shard import (
    ConfigError,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from tests.processes import run_processes
from tests.strategies.models import Trained
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    Run,
    assert_parity,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring()


class OverAllSamples(Trained, ContrastiveEncoder):
    """The example's loss, and one of the batch's statistics as of a batch norm (VICReg)."""

    def __init__(self) -> None:
        ContrastiveEncoder.__init__(self, width=16, num_blocks=4)

    def loss(self, batch: list[Tensor]) -> Tensor:
        own = torch.stack(self(torch.cat(batch)).chunk(2), dim=1)
        first, second = self.all_gather(own, sync_grads=True).flatten(0, -3).unbind(1)
        spread = first - first.mean(0)
        covariance = spread.T @ spread / (len(first) - 1)
        similarity = contrastive_loss(first, second, temperature=0.2)
        return similarity + covariance.square().sum() - first.std(0).sum()

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        first, noise = torch.randn(2, num_samples, 64, generator=generator)
        return TensorDataset(first, first + 0.3 * noise)


def built() -> OverAllSamples:
    torch.manual_seed(7)
    return OverAllSamples()


@cache
def alone() -> Run:
    return train(built())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_loss_over_all_ranks_samples_has_a_single_devices_gradient(
    name: str, num_ranks: int
) -> None:
    strategy = STRATEGIES[name](backend="in_process", bucket_mb=SMALL_BUCKET_MB)
    assert_parity(train(built(), strategy=strategy, devices=num_ranks), alone())


WITHIN_MODELS: dict[str, Any] = {
    "tensor": lambda: TensorParallelStrategy(
        backend="in_process", num_ranks=4, tensor_parallel_size=2, zero_stage=3
    ),
    "pipeline": lambda: PipelineParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, num_microbatches=1
    ),
    "hybrid": lambda: HybridParallelStrategy(
        backend="in_process",
        num_ranks=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        zero_stage=2,
        num_microbatches=1,
    ),
}


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:1 microbatches are fewer than the 2 stages")
@pytest.mark.parametrize(
    "name", ["tensor", "pipeline", pytest.param("hybrid", marks=pytest.mark.slow)]
)
def test_the_samples_of_split_models_are_those_of_the_data_parallel_ranks(name: str) -> None:
    assert_parity(train(built(), strategy=WITHIN_MODELS[name]()), alone())


def test_a_loss_over_the_batch_is_refused_where_microbatches_have_their_own() -> None:
    """A loss over the batch was silently one over each microbatch."""
    strategy = PipelineParallelStrategy(backend="in_process", num_ranks=2, num_microbatches=3)
    with pytest.raises(ConfigError, match=r"3 microbatches.*num_microbatches=1"):
        train(built(), strategy=strategy)


class UnevenBatches(OverAllSamples):
    """The ranks' last batches have different sizes."""

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        rank = self.trainer.global_rank
        return DataLoader(self.data(6 + rank), batch_size=4)


def fit_uneven_batches(**options: Any) -> None:
    torch.manual_seed(7)
    trainer = quiet_trainer(use_distributed_sampler=False, max_steps=4, devices=2, **options)
    trainer.fit(UnevenBatches())


def uneven_batches_on_gloo(name: str) -> str:
    ignore_upstream_warnings()
    try:
        fit_uneven_batches(strategy=STRATEGIES[name](backend="gloo"))
    except ConfigError as error:
        return str(error)
    return "no error"


UNEVEN = r"got a tensor of shape \(3, 2, 32\) on rank 1 and of shape \(2, 2, 32\).*drop_last"


@pytest.mark.parametrize("name", ["shard_ddp", "zero3"])
def test_samples_of_uneven_batches_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=UNEVEN):
        fit_uneven_batches(strategy=STRATEGIES[name](backend="in_process"))


def gathered_on_gloo(names: list[str]) -> list[Run]:
    ignore_upstream_warnings()
    return [
        train(
            built(), strategy=STRATEGIES[one](backend="gloo", bucket_mb=SMALL_BUCKET_MB), devices=2
        )
        for one in names
    ]


@pytest.mark.slow
def test_losses_over_all_samples_on_processes() -> None:
    for runs in run_processes(gathered_on_gloo, 2, names=["shard_ddp", "zero3"]):
        for run in runs:
            assert_parity(run, alone())
    for message in run_processes(uneven_batches_on_gloo, 2, name="zero2"):
        assert "drop_last" in message
