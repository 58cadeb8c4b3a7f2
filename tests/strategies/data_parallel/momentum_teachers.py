"""A network with a momentum teacher, and the ways in which projects write the teacher's update.

The sizes are odd, so that no rank's part of a tensor is like another's. Everything is float64: what
is not equal to a single device is wrong.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.parity import quiet_trainer
from tests.trainers import rank_loader

MOMENTUM = 0.5
STEPS, BATCH = 4, 12
WIDTH, OUTPUTS = 7, 3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}

Update = Callable[[nn.Module, nn.Module], None]


def assigned(student: nn.Module, teacher: nn.Module) -> None:
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        q.data = q.data * MOMENTUM + p.data * (1 - MOMENTUM)


@torch.no_grad()
def in_place(student: nn.Module, teacher: nn.Module) -> None:
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        q.mul_(MOMENTUM).add_(p, alpha=1 - MOMENTUM)


@torch.no_grad()
def foreach(student: nn.Module, teacher: nn.Module) -> None:
    torch._foreach_lerp_(
        list(teacher.parameters()), list(student.parameters()), weight=1 - MOMENTUM
    )


@torch.no_grad()
def by_state(student: nn.Module, teacher: nn.Module) -> None:
    """As averages over `state_dict` do."""
    ours = student.state_dict()
    for name, value in teacher.state_dict().items():
        value.copy_(value * MOMENTUM + ours[name] * (1 - MOMENTUM))


def loaded(student: nn.Module, teacher: nn.Module) -> None:
    ours, theirs = student.state_dict(), teacher.state_dict()
    teacher.load_state_dict(
        {name: theirs[name] * MOMENTUM + ours[name] * (1 - MOMENTUM) for name in theirs}
    )


def loaded_by_assigning(student: nn.Module, teacher: nn.Module) -> None:
    ours, theirs = student.state_dict(), teacher.state_dict()
    values = {name: theirs[name] * MOMENTUM + ours[name] * (1 - MOMENTUM) for name in theirs}
    teacher.load_state_dict(values, assign=True)


def replaced(student: nn.Module, teacher: nn.Module) -> None:
    for module, other in zip(student.modules(), teacher.modules(), strict=True):
        for name, p in module.named_parameters(recurse=False):
            q = getattr(other, name)
            value = q.data * MOMENTUM + p.data * (1 - MOMENTUM)
            setattr(other, name, nn.Parameter(value, requires_grad=q.requires_grad))


@torch.no_grad()
def set_in_place(student: nn.Module, teacher: nn.Module) -> None:
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        q.set_(q * MOMENTUM + p * (1 - MOMENTUM))


@torch.no_grad()
def written_out(student: nn.Module, teacher: nn.Module) -> None:
    """A result of shards, a parameter and one that is written to, in one operation."""
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        torch.add(q * MOMENTUM, p, alpha=1 - MOMENTUM, out=q)


def aliased(student: nn.Module, teacher: nn.Module) -> None:
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        q.data = p.data


def of_another_dtype(student: nn.Module, teacher: nn.Module) -> None:
    for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
        q.data = (q.data * MOMENTUM + p.data * (1 - MOMENTUM)).float().double()


def copied_anew(student: nn.Module, teacher: nn.Module) -> None:
    """For a `Taught`'s `self.teacher`; the caller puts it there."""


def clamped_too(student: nn.Module, teacher: nn.Module) -> None:
    """The student's own values are assigned, too."""
    assigned(student, teacher)
    for p in student.parameters():
        p.data = p.data.clamp(-0.3, 0.3)


UPDATES: dict[str, Update] = {
    one.__name__: one
    for one in (
        assigned,
        in_place,
        foreach,
        by_state,
        loaded,
        loaded_by_assigning,
        replaced,
        set_in_place,
        written_out,
        aliased,
        copied_anew,
        of_another_dtype,
        clamped_too,
    )
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.LayerNorm(2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Backbone(nn.Module):
    """Layers outside of the blocks and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Taught(L.LightningModule):
    """Learns from labels, and to be like its teacher.

    Args:
        hook: The hook in which it is called; "training_step" for the beginning of that.
        built_in: Where the teacher is built.
    """

    def __init__(
        self,
        update: str = "assigned",
        hook: str = "on_train_batch_end",
        trains_teacher: bool = False,
        built_in: str = "__init__",
    ) -> None:
        super().__init__()
        self.update, self.hook, self.trains_teacher = UPDATES[update], hook, trains_teacher
        self.neck = nn.Linear(WIDTH, WIDTH)
        self.net = Backbone()
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.double()
        self.built_in, self.losses = built_in, []
        self._build("__init__")

    def _build(self, place: str) -> None:
        if place == self.built_in and not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.net).requires_grad_(self.trains_teacher)

    def setup(self, stage: str) -> None:
        self._build("setup")

    def configure_model(self) -> None:
        self._build("configure_model")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.net(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self._called("training_step")
        x, y = batch[0].to(self.dtype), batch[1]
        features = self.net(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        loss = F.cross_entropy(self.head(self.neck(features)), y) + F.mse_loss(features, wanted)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch[0].to(self.dtype), batch[1]
        loss = F.cross_entropy(self.head(self.neck(self.teacher(x))), y)
        self.log("val", loss, sync_dist=True)

    def _called(self, hook: str) -> None:
        if hook == self.hook:
            self.update(self.net, self.teacher)
            if self.update is copied_anew:
                self.teacher = copy.deepcopy(self.net).requires_grad_(self.trains_teacher)

    def on_train_batch_start(self, *_: Any) -> None:
        self._called("on_train_batch_start")

    def on_before_zero_grad(self, *_: Any) -> None:
        self._called("on_before_zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self._called("on_train_batch_end")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._called("on_before_optimizer_step")

    def on_validation_epoch_start(self, *_: Any) -> None:
        self._called("on_validation_epoch_start")

    def on_train_epoch_end(self) -> None:
        self._called("on_train_epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=0.05, eps=1e-4)


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH * STEPS, 5, generator=generator, dtype=torch.float64)
        self.dataset = TensorDataset(x, (x.sum(1) > 0).long())

    def _loader(self) -> DataLoader:
        return rank_loader(self.trainer, self.dataset, BATCH)

    train_dataloader = val_dataloader = _loader


@dataclass
class Result:
    """What a run leaves: losses over ranks, validation's, weights."""

    losses: list[float]
    validated: float
    weights: dict[str, Tensor]


@dataclass
class MeanLosses(L.Callback):
    losses: list[float] = field(default_factory=list)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        own = [loss.item() for loss in pl_module.losses]
        collectives = getattr(trainer.strategy, "data_collectives", None)
        ranks = [own] if collectives is None else collectives.all_gather_object(own)
        self.losses = [sum(one) / len(one) for one in zip(*ranks, strict=True)]


def train(
    make: Callable[[], Taught] = Taught, callbacks: Sequence[L.Callback] = (), **options: Any
) -> Result:
    torch.manual_seed(3)
    model, means = make(), MeanLosses()
    defaults = {
        "max_steps": -1,
        "max_epochs": 2,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "num_sanity_val_steps": 0,
    }
    trainer = quiet_trainer(callbacks=[*callbacks, means], **(defaults | options))
    trainer.fit(model, datamodule=Data())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Result(means.losses, float(trainer.callback_metrics.get("val", 0)), weights)


def assert_same(result: Result, expected: Result) -> None:
    torch.testing.assert_close(
        torch.tensor(result.losses), torch.tensor(expected.losses), **TOLERANCE
    )
    assert result.weights.keys() == expected.weights.keys()
    for name, value in result.weights.items():
        torch.testing.assert_close(value, expected.weights[name], msg=name, **TOLERANCE)
    assert result.validated == pytest.approx(expected.validated, rel=1e-9)
