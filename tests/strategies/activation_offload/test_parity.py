"""Training with activations in host memory is training, under every strategy and checkpointing."""

from typing import Any

import pytest

from lightning_shard.data_parallel.offload.activations import HostActivations
from tests.strategies.activation_checkpointing.test_parity import STRATEGIES
from tests.strategies.offload.places import WARNINGS
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    single_device,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (*WARNINGS, r".* microbatches are fewer than the .* stages")
]

SLOW = pytest.mark.slow
CHOICES: dict[str, Any] = {"none": None, "full": "full", "selective": "selective"}
QUICK = {
    ("zero3", "none"),
    ("shard_ddp", "selective"),
    ("sequence", "full"),
    ("looped_bfs", "none"),
    ("tensor", "none"),
}


@pytest.fixture(autouse=True)
def some_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part of these small models' activations leave, and come back ahead of backward."""
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 10_000)


@pytest.mark.few_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=() if (name, choice) in QUICK else SLOW)
        for name in STRATEGIES
        for choice in CHOICES
    ],
)
def test_one_device(name: str, choice: str) -> None:
    make, model, num_ranks = STRATEGIES[name]
    strategy = make(
        activation_offload=True, activation_checkpointing=CHOICES[choice], bucket_mb=SMALL_BUCKET_MB
    )
    run = train(build(model), strategy=strategy, devices=num_ranks)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))
    down, up = (strategy.activation_traffic[way].bytes for way in ("down", "up"))
    assert 0 <= up <= down
    # a stage of one block keeps what it has received
    assert up > 0 or (name.startswith("hybrid") and choice == "full")
