"""Modules on meta that give themselves values in `configure_model`, as Lightning's docs do."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import TensorParallelStrategy, ZeRO2Strategy, ZeRO3Strategy
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring()

QUESTIONS: dict[str, Callable[[nn.Module], bool]] = {
    "is_meta of the next": lambda module: next(module.parameters()).is_meta,
    "is_meta of any": lambda module: any(one.is_meta for one in module.parameters()),
    "type of the device": lambda module: next(module.parameters()).device.type == "meta",
    "the device": lambda module: next(module.parameters()).device == torch.device("meta"),
    "buffers": lambda module: any(one.is_meta for one in module.buffers()),
    "state_dict": lambda module: all(one.is_meta for one in module.state_dict().values()),
    "data": lambda module: next(module.parameters()).data.is_meta,
    "a row": lambda module: next(module.parameters())[0].is_meta,
    "after sums": lambda module: (
        bool([one.sum() for one in module.parameters()]) and next(module.parameters()).is_meta
    ),
}


class Materialises(L.LightningModule):
    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question
        with torch.device("meta"):
            self.net = nn.Sequential(*[nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])

    def configure_model(self) -> None:
        if QUESTIONS[self.question](self.net):
            torch.manual_seed(42)
            self.net.to_empty(device="cpu")
            for layer in self.net:
                layer.reset_parameters()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(question: str, strategy: Any = "auto") -> dict[str, Tensor]:
    torch.manual_seed(7)
    module = Materialises(question)
    trainer = cpu_trainer(devices=1, strategy=strategy, max_steps=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(TensorDataset(torch.eye(4)), 4))
    return module.state_dict()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("strategy", [ZeRO2Strategy, ZeRO3Strategy, TensorParallelStrategy])
def test_a_module_that_asks_whether_it_is_on_meta_gives_itself_its_values(
    question: str, strategy: Any
) -> None:
    """It was told that it is on the CPU, and got other values than on one device.

    So was one that had read `state_dict()` or any view: these were noted as if they had values.
    """
    options: dict[str, Any] = {"backend": "in_process", "num_ranks": 2}
    if strategy is TensorParallelStrategy:
        options["plan"] = {"net.0": "colwise_gather_output"}
    run = trained(question, strategy(**options))
    torch.testing.assert_close(run, trained(question))
