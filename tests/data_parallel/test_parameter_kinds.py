"""Parameters of unusual shape, type and life, each against a single device."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.testing import run_ranks
from tests.data_parallel.test_training import (
    NUM_RANKS,
    Block,
    Case,
    Loss,
    Net,
    Session,
    accumulate,
    adam,
    automatic,
    check,
    clipped,
)
from tests.groups import all_ranks, engine_of

pytestmark = pytest.mark.each_value


class Small(Net):
    """A scalar, a single element and no element at all, also in the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.single + self.empty.sum()


class GainBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Gains(Net):
    block = GainBlock


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.turn * self.turn).real


class OneDouble(Net):
    """One float64 parameter, so one rank alone holds float64 gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((5 * x[:, 0].abs()).long() % 10)


class Transposed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = nn.Parameter(torch.randn(8, 12).t())


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad * 0.5)


class Thawing(Net):
    """Frozen but for the head; thaws in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 3:
            self.requires_grad_(True)
        return super().forward(x)


class WithTeacher(Net):
    def __init__(self) -> None:
        super().__init__()
        teacher = Net()
        teacher.load_state_dict(self.state_dict())
        self.teacher = teacher.requires_grad_(False)


def distil(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.teacher(batch)
    return (model(batch) - target + 0.1).square().mean()


@torch.no_grad()
def follow(model: nn.Module) -> None:
    for name, param in model.teacher.named_parameters():
        param.mul_(0.5).add_(model.get_parameter(name), alpha=0.5)


def follow_inside(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
        follow(session.model)
    session.optimizer.zero_grad()
    session.backward(value)
    session.optimizer.step()
    return value


def follow_outside(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    value = automatic(session, loss, batch)
    follow(session.model)
    return value


CASES = {
    "complex": Case(model=Complex),
    "complex_clipped": Case(model=Complex, update=clipped),
    "gains": Case(model=Gains, optimizer=adam),
    "hooked": Case(model=Hooked),
    "one_double": Case(model=OneDouble),
    "one_double_clipped": Case(model=OneDouble, update=clipped),
    "small": Case(model=Small, optimizer=adam),
    "sparse": Case(model=Sparse),
    "sparse_accumulated": Case(model=Sparse, update=accumulate),
    "teacher_that_follows": Case(model=WithTeacher, loss=distil, update=follow_outside),
    "thawing": Case(model=Thawing),
    "transposed": Case(model=Transposed),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_kinds(name: str, stage: int, num_ranks: int) -> None:
    check(CASES[name], stage, num_ranks)


@pytest.mark.parametrize("stage", range(4))
def test_a_teacher_that_follows_inside_a_step(stage: int) -> None:
    check(Case(model=WithTeacher, loss=distil, update=follow_inside), stage, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_fewer_elements_than_ranks(stage: int) -> None:
    check(Case(model=lambda: nn.Linear(4, 1, bias=False)), stage, num_ranks=4)


@pytest.mark.parametrize("stage", range(3))
def test_a_copy_is_full_and_independent(stage: int) -> None:
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Net()
        engine = engine_of(model, stage=stage)
        duplicate = copy.deepcopy(model)
        x = torch.ones(2, 4)
        with engine.step():
            loss = model(x).square().mean()
        twin_loss = duplicate(x).square().mean()
        twin_loss.backward()
        assert all(param.grad is None for param in model.parameters())
        return loss.detach(), twin_loss.detach()

    for result in run_ranks(fn, 2):
        assert result is not None
        torch.testing.assert_close(*result, rtol=0, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_weights_changed_by_hand_survive_an_update_with_a_master_copy(stage: int) -> None:
    def fn(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        collectives = all_ranks()
        options = EngineOptions(stage=stage, dtypes=DTypePolicy(compute=torch.bfloat16))
        engine = DataParallelEngine(model, collectives, options)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
        with engine.optimizer_view():
            pass
        engine.publish(model.parameters())
        engine.detach(restore=True)
        return model.weight.min().item()

    assert run_ranks(fn, 2) == [0.25, 0.25]


@pytest.mark.parametrize("stage", range(4))
def test_weights_changed_by_hand_before_the_first_step(stage: int) -> None:
    """As `load_state_dict` in `on_train_start` does."""

    def fn(rank: int) -> float:
        model = nn.Linear(4, 4)
        engine = engine_of(model, stage=stage)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
        with engine.step():
            model(torch.ones(2, 4))
        engine.detach(restore=True)
        return model.weight.min().item()

    assert run_ranks(fn, 2) == [0.25, 0.25]
