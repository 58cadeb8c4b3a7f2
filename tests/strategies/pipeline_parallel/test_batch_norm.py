"""`Trainer(sync_batchnorm=True)` where the ranks of a model have different layers."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError, HybridParallelStrategy, PipelineParallelStrategy
from tests.strategies.compiled import WIDTH, Compiled, LoopedNet
from tests.strategies.parity import Run, assert_parity, ignoring, train

pytestmark = ignoring()


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class NormedNet(LoopedNet):
    """Batch norms in the blocks, and before and after them."""

    block = NormedBlock

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.BatchNorm1d(4, affine=False)
        self.embed = nn.Sequential(self.inputs, self.embed)
        # without the tanh no gradient but rounding noise would reach the biases before
        self.head = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(WIDTH, momentum=None), self.head)


def built() -> Compiled:
    torch.manual_seed(7)
    return Compiled(net=NormedNet)


@cache
def alone() -> Run:
    return train(built())


def pipeline(**options: Any) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, **options
    )


def hybrid(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(
        backend="in_process",
        num_ranks=4,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        zero_stage=3,
        **options,
    )


@pytest.mark.filterwarnings("ignore:1 microbatches are fewer than the 2 stages")
@pytest.mark.parametrize(
    "strategy",
    [
        pipeline,
        pytest.param(hybrid, marks=pytest.mark.slow),
        pytest.param(lambda **o: pipeline(split="flops", **o), marks=pytest.mark.slow),
    ],
)
def test_skipped_batch_norms_are_not_synchronised(strategy: Any) -> None:
    """Skipped batch norms were synchronised without a batch."""
    run = train(built(), strategy=strategy(num_microbatches=1), sync_batchnorm=True)
    assert_parity(run, alone())


def test_synchronised_statistics_of_microbatches_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"its 2 microbatches.*num_microbatches=1"):
        train(built(), strategy=pipeline(num_microbatches=2), sync_batchnorm=True)
