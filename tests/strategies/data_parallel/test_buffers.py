"""Buffers that forwards add to: each rank counts by itself until an optimizer has stepped."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.fabric.loops import fabric_of, strategy_of
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()

SCHEMES = ("shard_ddp", "zero1", "zero2", "zero3")
KINDS = ("statistic", "whole", "outside", "assigned")
NUM_BATCHES = 5  # the last window of two is short


class Counting(nn.Module):
    """Counts its forwards in buffers of several kinds: 1 on rank 0, 10 on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("statistic", torch.zeros(1))
        self.register_buffer("whole", torch.zeros(1, dtype=torch.long))
        self.register_buffer("outside", torch.zeros(1), persistent=False)
        self.register_buffer("assigned", torch.zeros(1))
        self.seen: list[tuple[float, ...]] = []

    def counts(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, kind)) for kind in KINDS)

    def forward(self, x: Tensor, count: int) -> Tensor:
        self.seen.append(self.counts())
        self.statistic.add_(count)
        self.whole += count
        self.outside.add_(count)
        self.assigned = self.assigned + count
        return self.layer(x)


class Counted(L.LightningModule):
    """Sums what the ranks have counted before each step of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Counting()
        self.sums: list[float] = []
        self.in_validations: list[tuple[float, ...]] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch, 10 if self.global_rank else 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.in_validations.append(self.net.counts())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.sums.append(self.all_gather(self.net.statistic).sum().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2 * NUM_BATCHES, 2))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]


class ByHand(Counted):
    """Accumulates two batches by hand, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        is_last = batch_idx % 2 == 1 or batch_idx == NUM_BATCHES - 1
        if self.way == "toggled":
            with optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(self.loss(batch))
        elif self.way == "two graphs":
            loss = self.loss(batch) + self.loss(batch)
            with torch.no_grad():
                self.loss(batch)
            self.manual_backward(loss)
            is_last = True
        else:
            self.manual_backward(self.loss(batch))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


class LeavingOut(Counted):
    """Lets the gradients of every second batch lie for the next."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2 == 0 and batch_idx < NUM_BATCHES - 1:
            closure()
        else:
            optimizer.step(closure)


def fit(make: Callable[[], Counted], scheme: str, **options: Any) -> list[Any]:
    """Return of each rank what forwards have found, what hooks have summed, and validations."""
    found: list[Any] = [None, None]

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            each = pl_module.net.seen, pl_module.sums, pl_module.in_validations
            found[trainer.global_rank] = each

    trainer = quiet_trainer(
        strategy=f"{scheme}_in_process",
        devices=2,
        max_epochs=1,
        max_steps=-1,
        callbacks=[Look()],
        **{"accumulate_grad_batches": 1, "num_sanity_val_steps": 0, **options},
    )
    trainer.fit(make())
    return found


def table(*counts: float) -> list[tuple[float, ...]]:
    return [(count,) * len(KINDS) for count in counts]


WAYS: dict[str, tuple[Callable[[], Counted], dict[str, Any]]] = {
    "accumulate_grad_batches": (Counted, {"accumulate_grad_batches": 2}),
    "left out": (LeavingOut, {}),
    "by hand": (lambda: ByHand("plain"), {"gradient_clip_val": None}),
    "toggled": (lambda: ByHand("toggled"), {"gradient_clip_val": None}),
}


@pytest.mark.parametrize(
    ("way", "scheme"),
    [(way, scheme) for way in WAYS for scheme in ("shard_ddp", "zero2")]
    + [("accumulate_grad_batches", scheme) for scheme in ("zero1", "zero3")],
)
def test_ranks_count_by_themselves_while_gradients_accumulate(way: str, scheme: str) -> None:
    """Buffers followed rank 0 before each micro-batch: of another rank's only the last counted."""
    make, options = WAYS[way]
    first, second = fit(make, scheme, **options)
    assert first[0] == table(0, 1, 2, 3, 4)
    assert second[0] == table(0, 10, 2, 12, 4)
    assert first[1] == second[1] == [2 + 20, 4 + 22, 5 + 14]
    assert first[2] == second[2] == table(5)


def test_several_forwards_of_a_step_count_as_one() -> None:
    first, second = fit(lambda: ByHand("two graphs"), "zero2", gradient_clip_val=None)
    assert [one[0] for one in second[0]] == [0, 10, 20, 3, 13, 23, 6, 16, 26, 9, 19, 29, 12, 22, 32]
    assert first[1] == [3 + 30, 6 + 33, 9 + 36, 12 + 39, 15 + 42]


def test_a_validation_between_two_micro_batches_leaves_counts_alone() -> None:
    """It followed rank 0 too, in the middle of an accumulation."""
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    _, second = fit(Counted, "shard_ddp", **options)
    assert second[2] == table(10, 2, 12, 4, 5)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_under_fabric_too(scheme: str, tells: bool) -> None:
    found: list[Any] = [None, None]

    def train(fabric: Any) -> None:
        module = Counting()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for number in range(4):
            with fabric.no_backward_sync(model, enabled=tells and number % 2 == 0):
                loss = model(torch.ones(2, 2), 10 if fabric.global_rank else 1).sum()
                fabric.backward(loss)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        found[fabric.global_rank] = module.seen

    fabric_of(strategy_of(scheme)).launch(train)
    assert found == [table(0, 1, 2, 3), table(0, 10, 2, 12)]
