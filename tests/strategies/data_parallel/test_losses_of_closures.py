"""Optimizers that look at the loss of their closure see the mean over the ranks."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard import ConfigError
from tests.strategies.models import Layers
from tests.strategies.parity import GlobalBatches, ignoring
from tests.strategies.test_parity_evaluation import EvaluatedGPT
from tests.strategies.trainer.test_weight_averaging import SCHEMES, SINGLE, Scheme

pytestmark = ignoring(".*microbatches are fewer than the")
NUM_STEPS = 3


class LineSearch(Layers):
    """LBFGS, whose line search compares losses."""

    def __init__(self) -> None:
        super().__init__(3)
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logged.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )


class ByHand(LineSearch):
    """The same with a closure of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.logged.append(loss.item())
            return loss

        optimizer.step(closure)


class StepsByLoss(Optimizer):
    """Goes by the loss: element by element, and not without a closure."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * float(loss))
        return loss


class ByLoss(LineSearch):
    """Has an element-wise optimizer that needs a closure."""

    def configure_optimizers(self) -> Optimizer:
        return StepsByLoss(self.parameters())


class LayersByLoss(EvaluatedGPT):
    """The same for a model with blocks, and layers that can be split."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.logged: list[float] = []

    def configure_optimizers(self) -> Optimizer:
        return StepsByLoss(self.parameters())


class ManyLosses(ByHand):
    """Returns more than a loss from its closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = self.loss(batch)
            self.manual_backward(loss)
            return {"loss": loss}

        optimizer.step(closure)

    def configure_optimizers(self) -> Optimizer:
        return StepsByLoss(self.parameters())


class WeightsOfRanks(L.Callback):
    """Gathers what every rank has at the end."""

    def __init__(self) -> None:
        self.ranks: list[Any] = []

    def on_train_end(self, trainer: L.Trainer, pl_module: LineSearch) -> None:
        params = pl_module.parameters()
        full = [getattr(param, "full_tensor", param.detach)().clone() for param in params]
        own = full, pl_module.logged
        self.ranks = [own]
        if trainer.world_size > 1:
            self.ranks = trainer.strategy.collectives.all_gather_object(own)


def fit(scheme: Scheme, make: Callable[[], LineSearch]) -> tuple[LineSearch, WeightsOfRanks]:
    torch.manual_seed(7)
    model, ranks = make(), WeightsOfRanks()
    model.double()
    scheme.trainer(
        max_steps=NUM_STEPS,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        callbacks=[ranks],
        precision="64-true",
    ).fit(model, datamodule=GlobalBatches(model, NUM_STEPS))
    return model, ranks


SHARD_DDP = Scheme(num_ranks=2, make=SCHEMES["zero1"].make)


def of_ddp() -> Scheme:
    from lightning_shard import DDPStrategy

    return Scheme(num_ranks=2, make=DDPStrategy)


@pytest.mark.parametrize("make", [LineSearch, ByHand])
def test_each_rank_searches_along_a_line_by_its_own_loss(make: Callable[[], LineSearch]) -> None:
    alone, _ = fit(SINGLE, make)
    model, weights = fit(of_ddp(), make)
    (first, losses), (second, others) = weights.ranks
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-7, atol=1e-9)
    assert len(losses) == len(others) == len(alone.logged)
    assert losses != others  # a step's own loss stays its own
    means = [(one + other) / 2 for one, other in zip(losses, others, strict=True)]
    assert means == pytest.approx(alone.logged)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("zero1", ByLoss),
        ("zero3", ByLoss),
        pytest.param("2x2x2 stage 2", LayersByLoss, marks=pytest.mark.slow),
    ],
)
def test_an_element_wise_optimizer_that_requires_a_closure(name: str, make: Any) -> None:
    alone, _ = fit(SINGLE, make)
    model, _ = fit(SCHEMES[name], make)
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-7, atol=1e-9)


def test_a_closure_that_returns_more_than_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"StepsByLoss returned dict.*expected a loss of one"):
        fit(of_ddp(), ManyLosses)


def test_nothing_is_sent_for_optimizers_that_do_not_look_at_the_loss() -> None:
    from lightning_shard.optim.sharded_optimizer import looks_at_loss

    param = nn.Parameter(torch.ones(2))
    assert not looks_at_loss(torch.optim.AdamW([param]))
    assert not looks_at_loss(torch.optim.SGD([param]))
    assert looks_at_loss(torch.optim.LBFGS([param]))
    assert looks_at_loss(StepsByLoss([param]))
