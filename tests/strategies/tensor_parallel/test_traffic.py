"""What tensor-parallel ranks send: activations in their group, gradients once in the other."""

from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
from torch import Tensor

from lightning_shard import TensorParallelStrategy
from lightning_shard.backends.traffic import OperationTraffic
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, build, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()

MATRICES = 1000  # elements; what ranks agree on is smaller, gradients are larger


@dataclass
class Sent(L.Callback):
    """Elements sent in the data-parallel group, batch by batch."""

    reduced: list[int] = field(default_factory=list)
    _before: int = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        traffic: dict[str, OperationTraffic] = (
            trainer.strategy.gradient_groups.dp.traffic.snapshot()
        )
        names = ("all_reduce", "reduce_scatter")
        total = sum(traffic[name].elements for name in names if name in traffic)
        self.reduced.append(total - self._before)
        self._before = total


def sent(stage: int, accumulate: int) -> list[bool]:
    """Return for each batch whether gradients travelled in the data-parallel group."""
    model, census = build("gpt"), Sent()
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=2, plan=PLANS["gpt"], zero_stage=stage
    )
    strategy._options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    quiet_trainer(
        strategy=strategy,
        devices=4,
        callbacks=[census],
        accumulate_grad_batches=accumulate,
        max_steps=2,
        gradient_clip_val=None,
    ).fit(model, datamodule=GlobalBatches(model, 3))
    return [elements > MATRICES for elements in census.reduced]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_accumulation_waits_with_the_gradients(stage: int) -> None:
    boundaries = [False, False, True] * 2
    assert sent(stage, 3) == (boundaries if stage < 2 else [True] * 6)


class ByHand(L.LightningModule):
    """Accumulates inside `no_sync`, as manual optimization may."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gpt = build("gpt")
        self.sent: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss: Tensor = self.gpt.loss(batch) / 2
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with self.trainer.strategy.engine.no_sync():
                self.manual_backward(loss)
        traffic = self.trainer.strategy.gradient_groups.dp.traffic.snapshot()
        self.sent.append(traffic["all_reduce"].elements if "all_reduce" in traffic else 0)

    def configure_optimizers(self) -> Any:
        return self.gpt.configure_optimizers()["optimizer"]


def test_no_sync_sends_no_gradients() -> None:
    model = ByHand()
    plan = {f"gpt.{pattern}": style for pattern, style in PLANS["gpt"].items()}
    strategy = TensorParallelStrategy(backend="in_process", tensor_parallel_size=2, plan=plan)
    quiet_trainer(
        strategy=strategy, devices=4, accumulate_grad_batches=1, gradient_clip_val=None, max_steps=2
    ).fit(model, datamodule=GlobalBatches(model.gpt, 2))
    steps = [after - before for before, after in zip([0, *model.sent], model.sent, strict=False)]
    assert [elements > MATRICES for elements in steps] == [False, True, False, True]
