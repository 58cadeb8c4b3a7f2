"""Tests of `absent_advice`: averages that user code keeps of a model of which it has a part."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_shard.pipeline_parallel.absent_advice import explaining_absent
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.stacks import Stack, fit, pipeline

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]


class Average(nn.Module):
    """As of timm: a copy of a network, every entry of whose state is averaged."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), network.state_dict().values(), strict=True)
        for mean, value in pairs:
            mean.copy_(mean * 0.9 + value * 0.1)


class Averaged(Stack):
    """Holds the average beside the network; `blocks=` names the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.head = nn.Identity()
        self.network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.blocks = nn.ModuleList()
        self.average = Average(self.network)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update(self.network)


class InACallback(Averaged):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave it to the callback."""

    def callbacks(self) -> list[Callback]:
        return [_Averaging()]


class _Averaging(Callback):
    average: Average

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.average = Average(pl_module.network)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.average.update(pl_module.network)


def averaged(style: type[Stack], strategy: Any) -> dict[str, Tensor]:
    fitted = fit(style, strategy, max_epochs=1)
    callbacks: list[Any] = fitted.trainer.callbacks  # type: ignore[attr-defined]
    found = [one.average for one in callbacks if isinstance(one, _Averaging)]
    return {**fitted.model.state_dict(), **(found[0].state_dict() if found else {})}


@pytest.mark.parametrize("style", [Averaged, InACallback])
def test_an_average_by_hand_met_parameters_without_elements(style: type[Stack]) -> None:
    strategy = pipeline(2, "1f1b", blocks="network")
    torch.testing.assert_close(averaged(style, strategy), averaged(style, "auto"))


def test_other_errors_of_hooks_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="my own"), explaining_absent(["weight"]):
        raise RuntimeError("my own")
