"""What is copied between device and host, and held on either, for P parameters on N ranks.

down    each gradient's shard once for each update, in the optimizer's format
up      each updated shard once, in the format of forward; with offload="parameters" a block's
        shard for its forward and again for its backward, of each micro-batch
"""

from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest

from lightning_shard.data_parallel.held_bytes import HeldBytes
from tests.strategies.models import ExampleGPT
from tests.strategies.offload.places import PLACES, WARNINGS, offloaded
from tests.strategies.parity import GlobalBatches, quiet_trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]

NUM_RANKS, NUM_STEPS = 2, 3


@dataclass
class Count(L.Callback):
    """What rank 0 has copied in each batch, by direction, and holds after the last.

    Attributes:
        copied: Bytes (down, up) of each batch.
        blocks: Elements of this rank's shards of blocks, padding included.
        rest: Of all other shards.
        compute: Bytes of this rank's shards of everything on the device.
    """

    copied: list[tuple[int, int]] = field(default_factory=list)
    held: HeldBytes | None = None
    blocks: int = 0
    rest: int = 0
    compute: int = 0
    _before: tuple[int, int] = (0, 0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        traffic = trainer.strategy.offload_traffic
        now = traffic["down"].bytes, traffic["up"].bytes
        self.copied.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before, self.held = now, trainer.strategy.held_bytes()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for unit in trainer.strategy.engine.units:
            for flat in unit.flats:
                numel = flat.shard.numel()
                self.blocks += 0 if unit.is_root else numel
                self.rest += numel if unit.is_root else 0
                self.compute += numel * flat.shard.itemsize


def count(place: str, precision: str, accumulate: int = 1, **options: Any) -> Count:
    counted, model = Count(), ExampleGPT()
    trainer = quiet_trainer(
        strategy=offloaded(place, **options),
        devices=NUM_RANKS,
        callbacks=[counted],
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulate,
        precision=precision,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, NUM_STEPS))
    return counted


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("place", ["zero1", "zero2", "zero3"])
def test_each_byte_goes_once_each_way(place: str, precision: str, accumulate: int) -> None:
    counted = count(place, precision, accumulate)
    shard = counted.blocks + counted.rest
    down = shard * (2 if precision == "bf16-true" else 4)
    step = [(0, 0)] * (accumulate - 1) + [(down, counted.compute)]
    assert counted.copied == step * NUM_STEPS


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_parameters_come_for_forward_and_backward(prefetch: int, accumulate: int) -> None:
    counted = count("zero3-parameters", "32-true", accumulate, prefetch=prefetch)
    down, up = 4 * (counted.blocks + counted.rest), 4 * (2 * counted.blocks + counted.rest)
    step = [(0, up)] * (accumulate - 1) + [(down, up)]
    assert counted.copied[accumulate:] == step * (NUM_STEPS - 1)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_held_between_steps(place: str) -> None:
    num_params = sum(param.numel() for param in ExampleGPT().parameters())
    full, share = 4 * num_params, 4 * num_params / NUM_RANKS
    on_device = {
        "zero1": (full, full),
        "zero2": (full, 0),
        "zero3": (share, 0),
        "zero3-parameters": (0, 0),
    }
    held = count(place, "32-true").held
    assert held is not None
    assert (held.parameters, held.gradients) == pytest.approx(on_device[place], rel=0.01)
    assert held.optimizer_state == 0
    assert held.offloaded == pytest.approx(4 * share, rel=0.01)  # parameters, gradients, Adam's two
