"""A proof to the bit finds what a tolerance does not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.tools.proving.prove import prove
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


def proved(module: Any, **options: Any) -> Any:
    loader = DataLoader(Images().data(48), batch_size=BATCH)
    return prove(module, loader, num_ranks=2, num_steps=2, trainer_options=OPTIONS, **options)


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
