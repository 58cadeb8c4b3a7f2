"""Lightning's finders train for a while and go back: to weights that are loaded while training."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_shard import (
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO3Strategy,
)
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring(".*lr_scheduler.step.*", ".*suggested_lr.*")


class Tuned(ExampleGPT):
    """A model whose learning rate can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"kind": ZeRO1Strategy},
    "zero3": {"kind": ZeRO3Strategy},
    "tensor": {"kind": TensorParallelStrategy},
    "pipeline": {"kind": PipelineParallelStrategy},
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_learning_rate_finder_goes_back_to_the_weights_it_began_with(
    name: str, tmp_path: Any
) -> None:
    torch.manual_seed(3)
    model = Tuned()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = DataLoader(GlobalBatches(model).dataset, batch_size=4)
    strategy = STRATEGIES[name]["kind"](backend="in_process")
    trainer = quiet_trainer(
        strategy=strategy, devices=2, default_root_dir=tmp_path, accumulate_grad_batches=1
    )
    finder = Tuner(trainer).lr_find(
        model, train_dataloaders=data, num_training=8, update_attr=False
    )
    assert finder is not None
    assert all(math.isfinite(loss) for loss in finder.results["loss"])
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=key)
