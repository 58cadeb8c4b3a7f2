"""Local SGD written by hand, for the tests: copies of a model in one loop, no ranks.

Rank r of N has the samples r, r + N, ... and takes them in order, as under the strategy.
"""

from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shard import LocalSGDStrategy
from tests.strategies.parity import quiet_trainer

BATCH = 4  # of each rank
Weights = dict[str, Tensor]


class Tiny(L.LightningModule):
    """Two layers in float64, and an optimizer with a momentum of each rank's own."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.learning_rate, self.momentum = learning_rate, momentum

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        values, wanted = batch
        return F.mse_loss(self.network(values), wanted)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"lr": self.learning_rate, "momentum": self.momentum}
        return torch.optim.SGD(self.parameters(), **options)


def tiny_data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1000, 3, generator=generator, dtype=torch.float64)[:num_samples]
    return TensorDataset(values, torch.sin(values[:, :2] * 3) + values[:, 2:])


class TinyData(L.LightningDataModule):
    """The same samples for every run of so many steps on so many ranks."""

    def __init__(self, dataset: TensorDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def _loader(self, dataset: TensorDataset) -> DataLoader:
        place = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(dataset, **place, shuffle=False)
        return DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.dataset)

    def val_dataloader(self) -> DataLoader:
        return self._loader(tiny_data(16))


@dataclass
class OnRanks(L.Callback):
    """Each rank's parameters after each step, gathered at the end."""

    mine: list[Weights] = field(default_factory=list)
    of_ranks: list[list[Weights]] = field(default_factory=list)  # rank, then step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.mine.append(weights_of(pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.of_ranks = trainer.strategy.collectives.all_gather_object(self.mine)


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def trainer_of(num_ranks: int, num_steps: int, options: dict[str, Any], **more: Any) -> L.Trainer:
    """Return a Trainer with local SGD on in-process ranks, without clipping."""
    defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
    return quiet_trainer(
        strategy=LocalSGDStrategy(**({"backend": "in_process"} | options)),
        devices=num_ranks,
        max_steps=num_steps,
        **(defaults | more),
    )


def train_tiny(
    num_ranks: int, num_steps: int, *, module: Tiny | None = None, **options: Any
) -> tuple[OnRanks, Weights]:
    """Train under the strategy; return the ranks' way and the module's weights afterwards."""
    way, module = OnRanks(), module or Tiny()
    data = TinyData(tiny_data(num_ranks * BATCH * num_steps))
    trainer_of(num_ranks, num_steps, options, callbacks=[way]).fit(module, datamodule=data)
    return way, weights_of(module)


@dataclass
class ByHand:
    """Ranks as copies in a list.

    Attributes:
        common: The parameters that DiLoCo keeps.
    """

    copies: list[Tiny]
    optimizers: list[torch.optim.Optimizer]
    common: Weights
    momentum: Weights

    @classmethod
    def of(cls, num_ranks: int, module: Tiny | None = None) -> "ByHand":
        start = module or Tiny()
        copies = [deepcopy(start) for _ in range(num_ranks)]
        common = weights_of(start)
        zeros = {name: torch.zeros_like(value) for name, value in common.items()}
        return cls(copies, [copy.configure_optimizers() for copy in copies], common, zeros)

    def step(self, number: int) -> None:
        """Let every rank take step `number`, counted from 0."""
        self.backward(number)
        for optimizer in self.optimizers:
            optimizer.step()

    def step_together(self, number: int) -> None:
        """Let every rank take step `number` by the mean of the gradients."""
        self.backward(number)
        for params in zip(*(copy.parameters() for copy in self.copies), strict=True):
            mean = sum(param.grad for param in params) / len(params)
            for param in params:
                param.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def backward(self, number: int) -> None:
        ranks = len(self.copies)
        values, wanted = tiny_data(ranks * BATCH * (number + 1)).tensors
        samples = slice(number * ranks * BATCH, None)
        for rank, copy in enumerate(self.copies):
            copy.zero_grad()
            batch = [values[samples][rank::ranks], wanted[samples][rank::ranks]]
            copy.training_step(batch).backward()

    def mean(self, value: Callable[[Weights], Tensor]) -> Tensor:
        return sum(value(weights_of(copy)) for copy in self.copies) / len(self.copies)

    @torch.no_grad()
    def set(self, name: str, value: Tensor, keep: float = 0.0) -> None:
        """Give every rank a value of a parameter, mixed with what it keeps of its own."""
        for copy in self.copies:
            param = copy.get_parameter(name)
            param.copy_(keep * param + (1 - keep) * value)

    def average(self, names: list[str] | None = None) -> None:
        for name in names or self.common:
            self.set(name, self.mean(lambda own, name=name: own[name]))

    def outer_gradient(self, name: str) -> Tensor:
        return self.mean(lambda own: self.common[name] - own[name])

    def outer_step(self, name: str, gradient: Tensor) -> Tensor:
        """Nesterov's step, arXiv:2311.08105: learning rate 0.7, momentum 0.9."""
        self.momentum[name] = 0.9 * self.momentum[name] + gradient
        self.common[name] = self.common[name] - 0.7 * (gradient + 0.9 * self.momentum[name])
        return self.common[name]


def slow_but(quick: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Return parameter sets, of which all but the quick ones are marked as slow."""
    return [
        one
        if one in quick
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in every
    ]


def assert_same_weights(got: Weights, expected: Weights, **tolerance: float) -> None:
    tolerance = {"rtol": 1e-12, "atol": 1e-14} | tolerance
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], msg=name, **tolerance)
