"""Training with shards, gradients and optimizer state in host memory is training."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch.utils.data import DataLoader

from tests.strategies.models import ExampleGPT
from tests.strategies.offload.places import PLACES, WARNINGS, offloaded
from tests.strategies.parity import (
    ACCUMULATE,
    LONG_STEPS,
    NUM_STEPS,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    quiet_trainer,
    single_device,
    train,
)
from tests.trainers import rank_loader

pytestmark = [
    pytest.mark.timeout(300),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS),
]

SLOW = pytest.mark.slow
EIGHT = 8  # samples of a batch, of which each of as many ranks takes one


def train_offloaded(
    place: str, *, model: str = "gpt", devices: int = 2, num_steps: int = NUM_STEPS, **options: Any
) -> Run:
    strategy = offloaded(place, **options)
    return train(build(model), strategy=strategy, devices=devices, num_steps=num_steps)


def one_device(model: str = "gpt", num_steps: int = NUM_STEPS) -> Run:
    return single_device(Case(model=model, strategy="", num_ranks=1, num_steps=num_steps))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", ["gpt", "lstm", "gpt2", "llama", "mixture"])
@pytest.mark.parametrize("place", PLACES)
def test_one_device(place: str, model: str) -> None:
    assert_parity(train_offloaded(place, model=model), one_device(model))


@SLOW
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_20_steps_of_the_example_equal_one_device(place: str, num_ranks: int) -> None:
    run = train_offloaded(place, devices=num_ranks, num_steps=LONG_STEPS)
    assert_parity(run, one_device(num_steps=LONG_STEPS), num_steps=LONG_STEPS)


@SLOW
@pytest.mark.parametrize("checkpointing", ["full", "selective", ["Block"]], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_20_steps_with_activation_checkpointing(place: str, checkpointing: Any) -> None:
    run = train_offloaded(place, activation_checkpointing=checkpointing, num_steps=LONG_STEPS)
    assert_parity(run, one_device(num_steps=LONG_STEPS), num_steps=LONG_STEPS)


@SLOW
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("place", ["zero3", "zero3-parameters"])
def test_units_ahead(place: str, prefetch: int) -> None:
    assert_parity(train_offloaded(place, prefetch=prefetch), one_device())


class Batches(L.LightningDataModule):
    """One sample for each of eight ranks, or all for one device."""

    def train_dataloader(self) -> DataLoader:
        return rank_loader(self.trainer, ExampleGPT.data(EIGHT * ACCUMULATE * LONG_STEPS), EIGHT)


@SLOW
@pytest.mark.parametrize("checkpointing", [None, "full"])
@pytest.mark.parametrize("place", PLACES)
def test_20_steps_on_eight_ranks(place: str, checkpointing: str | None) -> None:
    def weights(**options: Any) -> dict[str, torch.Tensor]:
        model = build("gpt")
        quiet_trainer(max_steps=LONG_STEPS, **options).fit(model, datamodule=Batches())
        return model.state_dict()

    strategy = offloaded(place, activation_checkpointing=checkpointing)
    found, alone = weights(strategy=strategy, devices=EIGHT), weights()
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=2e-7)


@SLOW
@pytest.mark.parametrize("place", PLACES)
def test_two_runs_are_equal_to_the_bit(place: str) -> None:
    assert_bitwise_equal(train_offloaded(place), train_offloaded(place))
