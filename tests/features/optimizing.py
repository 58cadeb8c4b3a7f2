"""Ways of optimizing: optimizers, schedules, manual optimization."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.features.columns import PIPELINES, Here
from tests.features.declared import add, by, feature
from tests.features.network import Network, Report, fitted

GROUP = "Optimization"
MANUAL = by(PIPELINES, "ptimizes manually|anual optimization") | by("elastic", "optimizes manually")


class _Optimized(Network):
    """Uses the optimizers that it is given a function for."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(self)


def _optimized(make: Any, here: Here) -> Report:
    return fitted(here, _Optimized(make))


def _sgd(module: Network) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _scheduled(make: Any, **entries: Any) -> Any:
    def configure(module: Network) -> Any:
        optimizer = _sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **entries}}

    return configure


OPTIMIZERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "SGD": (lambda module: torch.optim.SGD(module.parameters(), lr=0.05), ()),
    "Adam": (lambda module: torch.optim.Adam(module.parameters(), 1e-2, eps=1e-3), ("local_sgd",)),
    "AdamW(fused)": (
        lambda module: torch.optim.AdamW(module.parameters(), 1e-2, eps=1e-3, fused=True),
        ("local_sgd",),
    ),
    "RMSprop": (
        lambda module: torch.optim.RMSprop(module.parameters(), 1e-3, eps=1e-2),
        ("local_sgd",),
    ),
    "Adagrad": (
        lambda module: torch.optim.Adagrad(module.parameters(), 1e-2, eps=1e-2),
        ("local_sgd",),
    ),
    "parameter groups": (
        lambda module: torch.optim.SGD(
            [
                {"params": module.backbone.parameters(), "lr": 0.02},
                {"params": module.head.parameters(), "weight_decay": 0.1},
            ],
            lr=0.05,
            momentum=0.9,
        ),
        (),
    ),
    "a list of one optimizer": (lambda module: [_sgd(module)], ()),
    "two lists": (lambda module: ([_sgd(module)], []), ()),
    "a schedule of each epoch": (_scheduled(lambda optimizer: StepLR(optimizer, 1, 0.5)), ()),
    "a schedule of each step": (
        _scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9), interval="step"),
        (),
    ),
    "a schedule with a frequency": (
        _scheduled(lambda optimizer: StepLR(optimizer, 1, 0.5), interval="step", frequency=2),
        (),
    ),
    "LambdaLR": (_scheduled(lambda optimizer: LambdaLR(optimizer, _half), interval="step"), ()),
    "OneCycleLR": (
        _scheduled(lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=10), interval="step"),
        (),
    ),
    "SequentialLR": (
        _scheduled(
            lambda optimizer: SequentialLR(
                optimizer, [StepLR(optimizer, 1, 0.5), CosineAnnealingLR(optimizer, 8)], [3]
            ),
            interval="step",
        ),
        (),
    ),
    "ReduceLROnPlateau": (
        _scheduled(
            lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, factor=0.1),
            monitor="val_loss",
        ),
        (),
    ),
}


def _half(step: int) -> float:
    return 0.5 if step % 2 else 1.0


for _title, (_make, _own) in OPTIMIZERS.items():
    add(GROUP, _title, partial(_optimized, _make), own=_own)


@feature(
    GROUP,
    "LBFGS",
    refused=by(
        ("zero1", "zero2", "zero3", "tensor_parallel", *PIPELINES, "async_sgd", "elastic"), "LBFGS"
    ),
    own=("local_sgd",),
)
def lbfgs(here: Here) -> Report:
    make = partial(_lbfgs, line_search_fn=None)
    return fitted(here, _Optimized(make), max_steps=2)


def _lbfgs(module: Network, **options: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.05, max_iter=2, **options)


@feature(GROUP, "configure_optimizers that returns None")
def no_optimizer(here: Here) -> Report:
    return fitted(here, _Optimized(lambda _: None))


class _Manual(Network):
    """Optimizes manually; with accumulation, clipping and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def clip(self, optimizer: Any) -> None:
        """Leave the gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.9)]


class _ClippedManual(_Manual):
    def clip(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")


class _Toggled(Network):
    """Two optimizers, by turns: first of the backbone, then of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        parts = (self.backbone, self.head)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


class _Truncated(Network):
    """Steps after each half of the features: truncated back-propagation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        state = torch.zeros_like(batch[0])
        for part in range(2):
            state = self.backbone(batch[0] + state)
            loss = F.mse_loss(self.head(state), batch[1]) / (1 + part)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            state = state.detach()
        self.log("loss", loss, sync_dist=True)


def _module(make: Any, here: Here) -> Report:
    return fitted(here, make())


add(GROUP, "manual optimization", partial(_module, _Manual), refused=MANUAL)
add(
    GROUP,
    "clip_gradients in manual optimization",
    partial(_module, _ClippedManual),
    refused=MANUAL,
    own=("local_sgd",),
)
add(GROUP, "several optimizers, toggled", partial(_module, _Toggled), refused=MANUAL)
add(GROUP, "truncated back-propagation by hand", partial(_module, _Truncated), refused=MANUAL)
