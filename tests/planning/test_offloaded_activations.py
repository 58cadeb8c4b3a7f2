"""What a dry run says of activations in host memory is what a real run has on device and host."""

from typing import Any

import pytest
from torch import Tensor

from lightning_shard import (
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.planning.simulated_step import LiveBytes
from tests.planning.test_dry_run import text
from tests.strategies.models import ExampleGPT
from tests.strategies.offload.places import WARNINGS
from tests.strategies.parity import GLOBAL_BATCH, GlobalBatches, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]
IN_FLIGHT = 30_000

MAKES: dict[str, Any] = {
    "zero2": ZeRO2Strategy,
    "zero3": ZeRO3Strategy,
    "tensor": lambda **options: TensorParallelStrategy(plan=PLANS["gpt"], **options),
    "sequence": lambda **options: TensorParallelStrategy(
        plan=PLANS["gpt"], sequence_parallel=True, **options
    ),
}


@pytest.fixture(autouse=True)
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small part of a forward's activations be on the device."""
    monkeypatch.setattr(HostActivations, "in_flight_bytes", IN_FLIGHT)


class Measured(ExampleGPT):
    """Counts what forward has left alive when backward begins, besides host memory.

    From the second batch on that is there already. The least counts: ranks of one process have each
    other's tensors as long as one of them is in a collective call.
    """

    on_host = 0
    live: LiveBytes

    def on_fit_start(self) -> None:
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        activations = self.trainer.strategy.run.steps.activations
        self.on_host = activations.host_bytes
        with LiveBytes() as self.live:
            loss = super().training_step(batch, batch_idx)
        assert batch_idx == 0 or activations.host_bytes == self.on_host
        return loss

    def backward(self, loss: Tensor, *args: Any) -> None:  # type: ignore[override]
        self.alive.append(self.live.alive)
        super().backward(loss, *args)


def measured(strategy: Any) -> Measured:
    model = Measured()
    quiet_trainer(
        strategy=strategy, devices=2, max_steps=4, accumulate_grad_batches=1, gradient_clip_val=None
    ).fit(model, datamodule=GlobalBatches(model, num_steps=4))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("name", MAKES)
def test_bytes_on_device_and_host(name: str, choice: Any) -> None:
    options = {"backend": "in_process", "activation_checkpointing": choice}
    plain = MAKES[name](**options)
    moving = MAKES[name](activation_offload=True, **options)
    batch = text(GLOBAL_BATCH if name in ("tensor", "sequence") else GLOBAL_BATCH // 2)
    (before,) = plain.dry_run(ExampleGPT(), batch, world_size=2).ranks
    (rank,) = moving.dry_run(ExampleGPT(), batch, world_size=2).ranks
    seen = measured(moving)
    assert rank.memory.offloaded == pytest.approx(seen.on_host, rel=0.02)
    assert rank.memory.activations == pytest.approx(min(seen.alive[1:]), rel=0.02)
    assert rank.memory.activations < before.memory.activations
    assert rank.memory.recomputed == before.memory.recomputed
    assert before.memory.offloaded == 0


def of_stages(choice: Any, **options: Any) -> Any:
    strategy = PipelineParallelStrategy(
        backend="in_process", num_microbatches=4, activation_checkpointing=choice, **options
    )
    return strategy.dry_run(ExampleGPT(num_layers=8), text(GLOBAL_BATCH), world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [None, "full"])
def test_stages_keep_what_they_receive_and_send(
    choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 0)
    plain, moving = of_stages(choice), of_stages(choice, activation_offload=True)
    for kept, away in zip(plain.ranks, moving.ranks, strict=True):
        assert 0 < away.memory.activations < kept.memory.activations / 2
        total = away.memory.activations + away.memory.offloaded
        assert total == kept.memory.activations
        assert away.sent == kept.sent
    assert "on host" in str(moving)
