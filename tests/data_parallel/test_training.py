"""Ways of training on ranks, each against one device on the same global batch, no Lightning."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ShardError
from lightning_shard.optim.clipping import clip_grad_norm
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies

pytestmark = pytest.mark.each_value

GLOBAL_BATCH = 12
NUM_STEPS = 4
NUM_RANKS = [2, pytest.param(3, marks=pytest.mark.slow)]
SMALL_BUCKET_MB = 1e-4  # no two blocks are joined


class Session:
    """What an update may use: the same calls with and without an engine."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, engine: DataParallelEngine | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = engine

    def step(self) -> AbstractContextManager[None]:
        return self.engine.step() if self.engine else nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.engine.no_sync() if self.engine else nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        with self.engine.backward() if self.engine else nullcontext():
            loss.backward(**options)

    def clip(self, max_norm: float) -> Tensor:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if self.engine is None:
            return nn.utils.clip_grad_norm_(params, max_norm)
        return clip_grad_norm(params, max_norm, self.engine)


Loss = Callable[[nn.Module, Tensor], Tensor]


def automatic(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    """Update as Lightning does: training_step, zero_grad, backward, step."""
    with session.step():
        value = loss(session.model, batch)
    session.optimizer.zero_grad()
    session.backward(value)
    session.optimizer.step()
    return value


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(GLOBAL_BATCH, 4, generator=generator) for _ in range(NUM_STEPS)]


def batches_marked_for_rank_one() -> list[Tensor]:
    """Batches in which two samples are marked, both rank 1's whether of two or of three ranks."""
    data = batches()
    for batch in data:
        batch[:, 3] = 0.0
        batch[1::6, 3] = 1.0
    return data


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training.

    Attributes:
        loss: From the model and this rank's batch, shape (B, 4); a mean over it.
    """

    model: Callable[[], nn.Module]
    loss: Loss = mean_square
    update: Callable[[Session, Loss, Tensor], Tensor] = automatic
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    data: Callable[[], list[Tensor]] = batches


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]


def train_alone(case: Case) -> Trained:
    """Train on one device."""
    torch.manual_seed(0)
    model = case.model()
    session = Session(model, case.optimizer(model))
    losses = [case.update(session, case.loss, batch).item() for batch in case.data()]
    return Trained(losses, _weights(model))


def train_on_ranks(
    case: Case,
    stage: int,
    num_ranks: int,
    bucket_mb: float = SMALL_BUCKET_MB,
    num_copies: int = 1,
    **options: Any,
) -> Trained:
    """Train on ranks; returns rank 0's result after checking that all ranks agree."""

    def fn(rank: int) -> Trained:
        torch.manual_seed(0)
        model = case.model()
        optimizer = case.optimizer(model)
        groups = in_copies(num_copies)
        chosen = EngineOptions(stage=stage, bucket_mb=bucket_mb, **options)
        engine = DataParallelEngine(model, groups, chosen)
        sharded = ShardedOptimizer(optimizer, engine)
        session = Session(model, optimizer, engine)
        losses = []
        for batch in case.data():
            loss = case.update(session, case.loss, batch[rank::num_ranks]).detach().clone()
            groups.dp.all_reduce(loss, "avg").wait()
            losses.append(loss.item())
        engine.detach(restore=True)
        sharded.detach()
        return Trained(losses, _weights(model))

    first, *others = (result for result in run_ranks(fn, num_ranks) if result is not None)
    for other in others:
        torch.testing.assert_close(other.weights, first.weights, rtol=0, atol=0)
    return first


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: with models this small several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check(
    case: Case,
    stage: int,
    num_ranks: int,
    bucket_mb: float = SMALL_BUCKET_MB,
    num_copies: int = 1,
    **options: Any,
) -> None:
    """Compare ranks with one device."""
    with one_thread():
        alone = train_alone(case)
        together = train_on_ranks(case, stage, num_ranks, bucket_mb, num_copies, **options)
    torch.testing.assert_close(together.losses, alone.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-4, atol=1e-6)


# --- models ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, three blocks and a head; subclasses change how blocks are called."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def net_that_calls(
    how: Callable[[nn.Module, Tensor], Tensor], block: type[nn.Module] = Block
) -> type[Net]:
    """Return a Net whose blocks are called as told."""
    return type("CustomNet", (Net,), {"call": lambda self, b, x: how(b, x), "block": block})


# --- updates ---------------------------------------------------------------------------------


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def two_backwards(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    session.optimizer.zero_grad()
    with session.step():
        first = loss(session.model, batch)
        session.backward(first)
        second = loss(session.model, 2 * batch)
        session.backward(second)
        session.optimizer.step()
    return first + second


def two_backwards_of_one_graph(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        out = session.model(batch)
    session.optimizer.zero_grad()
    first, second = out.square().mean(), out.abs().mean()
    session.backward(first, retain_graph=True)
    session.backward(second)
    session.optimizer.step()
    return first + second


def bare_backward(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        session.optimizer.zero_grad()
        value = loss(session.model, batch)
        value.backward()
        loss(session.model, 2 * batch).backward()
        session.optimizer.step()
    return value


def zero_in_place(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
    session.optimizer.zero_grad(set_to_none=False)
    session.backward(value)
    session.optimizer.step()
    return value


def closure(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    def evaluate() -> Tensor:
        with session.step():
            value = loss(session.model, batch)
        session.optimizer.zero_grad()
        session.backward(value)
        return value

    return session.optimizer.step(evaluate)  # type: ignore[no-any-return, call-overload]


def accumulate(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    session.optimizer.zero_grad()
    with session.no_sync():
        for scale in (1, 3):
            with session.step():
                value = loss(session.model, scale * batch)
            session.backward(value)
    with session.step():
        value = loss(session.model, 2 * batch)
    session.backward(value)
    session.optimizer.step()
    return value


def clipped(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
    session.optimizer.zero_grad()
    session.backward(value)
    norm = session.clip(0.05)
    session.optimizer.step()
    return value + norm


def forwards_elsewhere(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    session.model(batch)  # with a graph that nobody uses
    value = automatic(session, loss, batch)
    session.model.eval()
    with torch.no_grad():
        session.model(session.model(batch).repeat(1, 2)[:, :4])
    with torch.inference_mode(), session.step():
        session.model(batch)
    session.model.train()
    return value


def skipped_step(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        loss(session.model, batch)
    session.optimizer.zero_grad()
    session.optimizer.step()
    return automatic(session, loss, batch)


def clamp_outside(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    value = automatic(session, loss, batch)
    for param in session.model.parameters():
        param.data.clamp_(-0.2, 0.2)
    return value


def clamp_inside(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    """As a Wasserstein GAN's critic, under manual optimization."""
    with session.step():
        value = loss(session.model, batch)
        session.optimizer.zero_grad()
        session.backward(value)
        session.optimizer.step()
        for param in session.model.parameters():
            param.data.clamp_(-0.2, 0.2)
    return value


def module_zero_grad(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
    session.model.zero_grad()
    session.backward(value)
    session.optimizer.step()
    return value


def torch_clipping(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
        session.optimizer.zero_grad()
        session.backward(value)
        nn.utils.clip_grad_norm_(session.model.parameters(), 0.05)
        session.optimizer.step()
    return value


# --- losses ----------------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    out = model(batch)
    (grad,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
    return out.square().mean() + (grad.norm(dim=1) - 1).square().mean()


def weighted_by_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    out = model(batch)
    (grad,) = torch.autograd.grad(out.sum(), batch, retain_graph=True)
    return (out.square().sum(1) * grad.norm(dim=1)).mean()


def with_teacher(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        before = model(2 * batch)
    out = model(batch)
    with torch.no_grad():
        after = model(3 * batch)
    return (out - 0.1 * before - 0.1 * after).square().mean()


def from_leaf_input(model: nn.Module, batch: Tensor) -> Tensor:
    x = model.embed(batch).detach().requires_grad_()
    for block in model.blocks:
        x = block(x)
    return model.head(x).square().mean()


UPDATES = {
    "automatic": Case(model=Net),
    "adam": Case(model=Net, optimizer=adam),
    "accumulate": Case(model=Net, update=accumulate),
    "bare_backward": Case(model=Net, update=bare_backward),
    "clamp_outside": Case(model=Net, update=clamp_outside),
    "clipped": Case(model=Net, update=clipped),
    "closure": Case(model=Net, update=closure),
    "forwards_elsewhere": Case(model=Net, update=forwards_elsewhere),
    "gradient_penalty": Case(model=Net, loss=gradient_penalty),
    "skipped_step": Case(model=Net, update=skipped_step),
    "two_backwards": Case(model=Net, update=two_backwards),
    "two_backwards_of_one_graph": Case(model=Net, update=two_backwards_of_one_graph),
    "weighted_by_gradient": Case(model=Net, loss=weighted_by_gradient),
    "with_teacher": Case(model=Net, loss=with_teacher),
    "zero_in_place": Case(model=Net, update=zero_in_place),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_updates(name: str, stage: int, num_ranks: int) -> None:
    check(UPDATES[name], stage, num_ranks)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("stage", range(4))
def test_updates_with_two_copies_of_the_state(name: str, stage: int) -> None:
    check(UPDATES[name], stage, num_ranks=4, num_copies=2)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", UPDATES)
def test_updates_with_blocks_joined_in_one_unit(name: str) -> None:
    check(UPDATES[name], stage=3, num_ranks=2, bucket_mb=25)


def test_lbfgs_without_sharding() -> None:
    check(Case(model=Net, optimizer=lbfgs, update=closure), stage=0, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_weights_clamped_inside_a_step_stay_clamped(stage: int) -> None:
    check(Case(model=Net, update=clamp_inside), stage, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_of_the_module_forgets_reduced_gradients(stage: int) -> None:
    check(Case(model=Net, update=module_zero_grad), stage, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_torch_clipping_is_right_or_refused(stage: int) -> None:
    with suppress(ShardError):
        check(Case(model=Net, update=torch_clipping), stage, num_ranks=2)


def by_hand(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    with session.step():
        value = loss(session.model, batch)
        params = list(session.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(value, params), strict=True):
            param.grad = grad
        session.optimizer.step()
    return value


@pytest.mark.parametrize("stage", range(4))
def test_gradients_set_by_hand_are_averaged(stage: int) -> None:
    check(Case(model=Net, update=by_hand), stage, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_a_penalty_over_parameters_is_right_or_refused(stage: int) -> None:
    def penalised(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    with suppress(ShardError):
        check(Case(model=Net, loss=penalised), stage, num_ranks=2)
