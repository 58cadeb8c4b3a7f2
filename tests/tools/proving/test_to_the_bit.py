"""A proof to the bit finds what a tolerance does not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy
from lightning_shard.tools.proving.prove import prove
from tests.strategies.pipeline_parallel.test_same_bits import Staged
from tests.strategies.test_same_bits import BATCH, Images

OPTIONS = {"accumulate_grad_batches": 2}


class Plain(Images):
    """Draws nothing, so that the ranks may be compared with one device, too."""

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        features = self.layers[5](images.flatten(1)[:, :48].repeat(1, 2))
        return torch.nn.functional.cross_entropy(self.layers[8](features.relu()), labels)


class Planted(Plain):
    """Has an error of 1e-7 in one gradient of rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            self.layers[5].weight.register_hook(lambda grad: grad + 1e-7)
        return super().training_step(batch, batch_idx)


class Nudge(torch.autograd.Function):
    """Adds an error of 1e-7 to a gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + 1e-7


class Nudged(nn.Module):
    """Nudges what goes through it, where it is told to."""

    is_wrong = False

    def forward(self, features: Tensor) -> Tensor:
        return Nudge.apply(features) if self.is_wrong else features  # type: ignore[no-untyped-call,no-any-return]


class PlantedInStage(Staged):
    """Has an error of 1e-7 in one gradient of what the second stage sends back."""

    def __init__(self) -> None:
        super().__init__()
        self.nudged = Nudged()
        self.layers[3].insert(1, self.nudged)

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        self.nudged.is_wrong = strategy.mesh_size == 2 and strategy.mesh_rank == 1


def proved(module: Any, *, num_ranks: int = 2, batch_size: int = BATCH, **options: Any) -> Any:
    loader = DataLoader(Images().data(96), batch_size=batch_size)
    given: dict[str, Any] = {"num_steps": 2, "trainer_options": OPTIONS} | options
    return prove(module, loader, num_ranks=num_ranks, **given)


@pytest.mark.parametrize(
    "strategy",
    ["shard_ddp", *(pytest.param(f"zero{one}", marks=pytest.mark.slow) for one in (1, 2, 3))],
)
def test_a_small_error_of_one_rank_is_found_and_named(strategy: str) -> None:
    """It is far below what rounding explains, and says the rank, the micro-batch and the weight."""
    found = proved(Planted(), strategy=strategy, to_the_bit=True)
    assert found.outcome == "different"
    assert found.first.place.name == "layers.5.weight"
    assert found.first.rank == 1
    assert found.first.place.micro == 3
    assert found.cause.name == "rank dependent"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_of_shards_are_compared_with_one_rank(stage: int) -> None:
    """One rank was asked for copies, too, and refused them."""
    strategy = HybridParallelStrategy(data_parallel_size=(2, 2), zero_stage=stage)
    given: dict[str, Any] = {"strategy": strategy, "num_ranks": 4, "to_the_bit": True}
    assert proved(Images(), **given).outcome == "equal"
    found = proved(Planted(), **given)
    assert (found.outcome, found.first.rank) == ("different", 1)
    assert found.first.place.name == "layers.5.weight"


@pytest.mark.slow
def test_stages_are_compared_with_one_rank_of_as_many_microbatches() -> None:
    """One rank took as many batches a step as there are stages, and so other samples."""
    strategy: Any = PipelineParallelStrategy(num_microbatches=4)
    given: dict[str, Any] = {"strategy": strategy, "batch_size": 8, "to_the_bit": True}
    assert proved(Staged(), **given).outcome == "equal"
    found = proved(PlantedInStage(), **given)
    assert found.outcome == "different"
    assert found.first.place.name == "layers.2.1.bias"  # the first that the error reaches
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2)
    given |= {"strategy": strategy, "num_ranks": 4, "batch_size": 4}
    assert proved(Staged(), **given).outcome == "equal"


@pytest.mark.slow
def test_a_tolerance_hides_a_small_error() -> None:
    """Ranks deviate from one device by as much as rounding does, whatever else is wrong."""
    assert proved(Planted(), dropout=False).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_random_numbers_and_batch_norms_are_equal_to_the_bit(strategy: str) -> None:
    """Each had to be left out of a comparison with one device."""
    assert proved(Images(), strategy=strategy, to_the_bit=True).is_equal


def test_what_cannot_have_the_same_bits_is_refused() -> None:
    """The strategy says why."""
    found = proved(Images(), strategy="tensor_parallel", to_the_bit=True)
    assert found.outcome == "refused"
    assert "same_bits=True" in found.error
