"""Parameters that exist once per host are edited, to the bit, as if each rank had its own."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.backends.shm import backend as shm_backend
from tests.processes import run_processes
from tests.trainers import cpu_trainer

WIDTH, NUM_RANKS = 96, 2  # of whose matrices pages hold elements of two ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clamps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            self.linear.weight.data.mul_(0.99).clamp_(-0.05, 0.05)
        return x + self.linear(x).tanh()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = (self(batch[0]) ** 2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.losses.append(float(self(batch[0]).mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Clamping(Model):
    """Each forward makes the weights smaller."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.clamps = True


class AtRest(Model):
    """Weights are edited between the steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.blocks[1].parameters():
                param.add_(0.01)


class BeforeTheUpdate(Model):
    """A decay of one's own, right before the optimizer's step."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.head.parameters():
                param.mul_(0.8)


class Swapping(Model):
    """Other weights for each validation, and the old ones back, by their tensors."""

    def on_validation_start(self) -> None:
        self.kept = [param.data for param in self.parameters()]
        for param in self.parameters():
            param.data = param.data * 0.5

    def on_validation_end(self) -> None:
        for param, kept in zip(self.parameters(), self.kept, strict=True):
            param.data = kept


class OneRankEdits(Model):
    """What one rank alone writes into parameters; only its own part is for all."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_rank == 1:
            with torch.no_grad():
                for param in self.parameters():
                    param.mul_(1.01)


class TwoOptimizers(Model):
    """Optimizers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers = self.optimizers()
        optimizer = optimizers[index % 2]
        loss = (self(batch[0]) ** 2).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.blocks.parameters(), lr=0.1, momentum=0.9)
        return first, torch.optim.AdamW(self.head.parameters(), lr=0.01)


class Searching(Model):
    """An optimizer that evaluates its closure several times."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Rprop(self.parameters(), lr=0.01)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)
        optimizer.step(closure)


class Loading(Model):
    """Weights of a state are loaded in the middle of the fit."""

    def on_train_batch_end(self, _: Any, __: Any, index: int) -> None:
        if index == 2:
            state = {name: value.clone() * 0.7 for name, value in self.first.items()}
            self.load_state_dict(state)

    def on_fit_start(self) -> None:
        torch.manual_seed(3)
        self.first = Model().state_dict()


SCRIPTS = (Model, Clamping, AtRest, BeforeTheUpdate, Swapping, TwoOptimizers, Searching, Loading)


def fit(script: type[Model], strategy: str, backend: str) -> tuple[list[float], list[Tensor], bool]:
    """Return the losses, the weights, and whether parameters existed once."""
    torch.manual_seed(1)
    model = script()
    data = TensorDataset(torch.randn(48, WIDTH))
    shared: list[Any] = []
    share = shm_backend.share

    def noted(*args: Any) -> Any:
        shared.append(share(*args))
        return shared[-1]

    trainer = cpu_trainer(
        strategy=f"{strategy}_{backend}", devices=NUM_RANKS, max_epochs=2, num_sanity_val_steps=0
    )
    with patch("lightning_shard.backends.shm.backend.share", noted):
        trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=12))
    weights = [param.detach().clone() for param in model.parameters()]
    return model.losses, weights, bool(shared) and None not in shared


def fit_all(backend: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # Lightning's
    return {
        f"{strategy} {script.__name__}": fit(script, strategy, backend)
        for strategy in ("zero1", "zero2", "zero3")
        for script in (*SCRIPTS, OneRankEdits)
    }


@pytest.fixture(scope="module")
def on_shm() -> list[dict[str, Any]]:
    return run_processes(fit_all, NUM_RANKS, backend="shm")


@pytest.fixture(scope="module")
def on_gloo() -> list[dict[str, Any]]:
    return run_processes(fit_all, NUM_RANKS, backend="gloo")


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the names of the fits whose losses or weights differ in any bit."""
    return [
        name
        for name, (losses, weights, _) in ours.items()
        if losses != theirs[name][0] or not all(map(torch.equal, weights, theirs[name][1]))
    ]


@pytest.mark.slow
def test_edits_do_what_they_do_where_each_rank_has_a_copy(
    on_shm: list[dict[str, Any]], on_gloo: list[dict[str, Any]]
) -> None:
    assert all(fit[2] for fit in on_shm[0].values()), "no parameters in common"
    assert not any(fit[2] for fit in on_gloo[0].values())
    for ours, theirs in zip(on_shm, on_gloo, strict=True):
        assert differences(ours, theirs) == []


def test_ranks_end_with_the_same_weights(on_shm: list[dict[str, Any]]) -> None:
    first, second = on_shm
    for name in first:
        assert all(map(torch.equal, first[name][1], second[name][1])), name
