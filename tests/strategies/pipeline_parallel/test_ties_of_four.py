"""Weights that different ranks of a pipeline share, several sets of them."""

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import PipelineParallelStrategy
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()


class Tied(L.LightningModule):
    """Two of four blocks have one weight; a scale of the module's own begins and ends the step."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[second].weight = self.blocks[first].weight

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        y = x * self.scale
        for block in self.blocks:
            y = torch.tanh(block(y))
        return (y * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 3), (1, 2)])
def test_ranks_of_two_sets_meet(first: int, second: int) -> None:
    """Groups were named by how many a rank had made: ranks of both sets had made more."""
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    runs = []
    for strategy, devices in ((PipelineParallelStrategy(backend="in_process"), 4), ("auto", 1)):
        model = Tied(first, second)
        quiet_trainer(strategy=strategy, devices=devices, max_steps=2).fit(
            model, DataLoader(data, batch_size=8)
        )
        runs.append({name: one.detach() for name, one in model.named_parameters()})
    torch.testing.assert_close(*runs)
