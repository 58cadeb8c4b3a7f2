"""Stages that are alike in what a step costs, measured before training."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_shard import PipelineParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring()


class Wide(ExampleGPT):
    """Its head is as much work as several blocks."""

    def __init__(self) -> None:
        super().__init__(num_layers=6)


class Bounds(Callback):
    """Keeps where the model has been cut."""

    bounds: tuple[int, ...] = ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.bounds = trainer.strategy.pipeline._model.partition.bounds


def bounds_of(split: str) -> tuple[int, ...]:
    model = Wide()
    found = Bounds()
    strategy = PipelineParallelStrategy(backend="in_process", split=split)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_steps=1, accumulate_grad_batches=1, callbacks=[found]
    )
    trainer.fit(model, datamodule=GlobalBatches(model))
    return found.bounds


@pytest.mark.slow
@pytest.mark.parametrize("split", ["flops", "memory"])
def test_the_stage_with_the_head_has_fewer_blocks(split: str) -> None:
    first, cut, last = bounds_of(split)
    assert (first, last) == (0, 6)
    assert cut >= 3


def test_nothing_to_measure_without_training() -> None:
    model = Wide()
    strategy = PipelineParallelStrategy(backend="in_process", split="flops")
    trainer = quiet_trainer(strategy=strategy, devices=2)
    data = DataLoader(GlobalBatches(model).dataset, batch_size=4)
    with pytest.raises(ConfigError, match="nothing is trained"):
        trainer.validate(model, dataloaders=data)
