"""What is done with parameters, gradients and the loss, on stages and on a single device."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_shard.errors import ConfigError
from tests.strategies.models import warm_up
from tests.strategies.parity import ignoring
from tests.strategies.stacks import (
    ALL_PIPELINES,
    PIPELINES,
    Block,
    OfEveryRank,
    Stack,
    check,
    fit,
    fit_with,
    pipeline,
)

pytestmark = ignoring(".* microbatches are fewer than the")


class Frozen(Stack):
    """Some layers do not learn."""

    frozen: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)


class FrozenFirst(Frozen):
    frozen = ("embed", "blocks.0", "blocks.1")


class FrozenMiddle(Frozen):
    frozen = ("blocks.1", "blocks.2")


class FrozenLast(Frozen):
    frozen = ("blocks.2", "blocks.3", "head")


class OnlyHead(Frozen):
    frozen = ("embed", "blocks")


class OnlyEmbedding(Frozen):
    frozen = ("blocks", "head")


class Unused(Stack):
    """Parameters without gradients, before the blocks, in them and after them."""

    class block(Block):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Hooked(Stack):
    """Hooks of parameters, which see the gradient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def configure_optimizers(self) -> Any:
        for name, param in self.named_parameters():  # here: ranks of one process are copies
            if name.endswith("weight"):
                param.register_hook(self.doubled(name))
        return super().configure_optimizers()

    def doubled(self, name: str) -> Any:
        def hook(grad: Tensor) -> Tensor:
            self.seen.append((name, grad.norm().item()))
            return 2 * grad

        return hook


class Groups(Stack):
    """Two groups, a scheduler and clipping."""

    options: ClassVar = {"gradient_clip_val": 0.05}

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-6)
        scheduler = {"scheduler": LambdaLR(optimizer, warm_up), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class ByAdafactor(Stack):
    """An optimizer that needs each parameter whole, and keeps rows and columns of it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.05)


class ByMuon(Stack):
    """An optimizer of full matrices; one of them is on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].layer.weight = self.blocks[0].layer.weight
        for param in self.parameters():
            param.requires_grad_(param.ndim == 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=0.02)


class ByLBFGS(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ClippedByValue(Stack):
    options: ClassVar = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Accumulated(Stack):
    """Three batches a step; the last step of an epoch has two."""

    options: ClassVar = {"accumulate_grad_batches": 3}


class TiedAcross(Stack):
    """One matrix in the first block and the last one, so on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].layer.weight = self.blocks[0].layer.weight


class FrozenWide(FrozenFirst):
    """In float64 a stage has no parameter that is trained."""

    options: ClassVar = {"precision": "64-true"}


class ScaledOutside(Stack):
    """A parameter of the module itself, which does not say where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]) * self.temperature, batch[1])


class DictOfStep(Stack):
    """The step returns a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


TRAININGS = [
    FrozenFirst,
    FrozenMiddle,
    FrozenLast,
    OnlyHead,
    OnlyEmbedding,
    Unused,
    Groups,
    ByAdafactor,
    ByMuon,
    ClippedByValue,
    Accumulated,
    TiedAcross,
    FrozenWide,
    ScaledOutside,
    DictOfStep,
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES)
@pytest.mark.parametrize("style", TRAININGS)
def test_trainings(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


def test_an_optimizers_rows_and_columns_come_together() -> None:
    alone, staged = fit(ByAdafactor), fit(ByAdafactor, pipeline(2, "1f1b"))
    states = [fitted.trainer.optimizers[0].state_dict()["state"] for fitted in (alone, staged)]
    assert states[0][0].keys() >= {"row_var", "col_var"}
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-7)


def test_an_optimizer_that_looks_at_all_parameters_at_once() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS does not update each parameter by itself"):
        fit(ByLBFGS, pipeline(2, "1f1b"))


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_hooks_of_parameters_see_the_gradient_of_the_batch_once(
    num_ranks: int, schedule: str
) -> None:
    gather = OfEveryRank()
    alone = fit(Hooked)
    staged = fit_with(Hooked, gather, num_ranks, schedule)
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)
    seen = dict(sorted(one for rank in gather.ranks for one in rank))
    assert sum(map(len, gather.ranks)) == len(alone.model.seen)
    torch.testing.assert_close(seen, dict(sorted(alone.model.seen)), rtol=1e-4, atol=1e-7)


class NormsLogged(Stack):
    """Gradients are looked at before the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for name, param in self.named_parameters():
            if param.grad is not None and param.numel():
                self.log(f"norm/{name}", param.grad.norm())


@pytest.mark.slow
def test_hooks_see_the_gradients_of_all_stages() -> None:
    """Hooks saw the gradients of a rank's own stages only."""
    alone, staged = fit(NormsLogged), fit(NormsLogged, pipeline(2, "1f1b"))
    expected = alone.trainer.callback_metrics
    assert set(staged.trainer.callback_metrics) == set(expected)
    for name, value in staged.trainer.callback_metrics.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7)
