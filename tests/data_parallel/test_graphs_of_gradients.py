"""Stage 3: several graphs that no hook tells of, each with a backward of its own in one step.

Such are gradients that are differentiated again, blocks that return objects, and parameters that a
step uses outside of their block. The first backward gave their parameters back: another one failed
in torch on memory of no size, or ended the process.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard import ZeRO3Strategy
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.test_block_calls import Box
from tests.data_parallel.test_training import (
    Block,
    Case,
    Loss,
    Net,
    Session,
    check,
    gradient_penalty,
    mean_square,
    net_that_calls,
    train_on_ranks,
)
from tests.data_parallel.units.test_unsharding import full_bytes, make_engine
from tests.strategies.parity import ignoring
from tests.strategies.stacks import Block as StackBlock
from tests.strategies.stacks import Stack, fit

pytestmark = ignoring()


class Telling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Box(super().forward(x))  # type: ignore[return-value]


TellingNet = net_that_calls(lambda block, x: block(x).value, Telling)
Recomputing = net_that_calls(lambda block, x: checkpoint(block, x, use_reentrant=False))  # type: ignore[no-any-return]


def penalty_of_blocks(model: nn.Module, batch: Tensor) -> Tensor:
    """A penalty of the gradient of what the first block is given, which is a leaf."""
    x = model.embed(batch).detach().requires_grad_()
    out = x
    for block in model.blocks:
        out = model.call(block, out)
    (grad,) = torch.autograd.grad(model.head(out).sum(), x, create_graph=True)
    return model(batch).square().mean() + 3e-3 * grad.square().sum(1).mean()


def third_derivative(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return out.square().mean() + 1e-5 * bend.square().sum(1).mean()


def norm_of_weights(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def update_after(
    between: Callable[[Session], object], *, first: int = 0, inside: bool = True
) -> Callable[[Session, Loss, Tensor], Tensor]:
    """Return an update by two losses, each with a backward of its own.

    Args:
        between: Called between the backwards.
        first: Number of the loss whose backward comes first.
        inside: Whether the optimizer steps inside of the step (manual optimization).
    """

    def update(session: Session, loss: Loss, batch: Tensor) -> Tensor:
        session.optimizer.zero_grad()
        with session.step():
            losses = [loss(session.model, batch), loss(session.model, 2 * batch)]
            session.backward(losses[first])
            between(session)
            session.backward(losses[1 - first])
            if inside:
                session.optimizer.step()
        if not inside:
            session.optimizer.step()
        return losses[0] + losses[1]

    return update


def retained(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    session.optimizer.zero_grad()
    with session.step():
        value = loss(session.model, batch)
        session.backward(value, retain_graph=True)
        session.backward(0.1 * value)
        session.optimizer.step()
    return value


def clip(session: Session) -> None:
    session.clip(0.05)


def halve(session: Session) -> None:
    for param in session.model.parameters():
        param.grad.mul_(0.5)  # type: ignore[union-attr]


def nothing(session: Session) -> None:
    """Go on with the next backward."""


halves = update_after(nothing)
CASES = {
    "gradient_of_inputs": Case(model=Net, loss=gradient_penalty, update=halves),
    "last_first": Case(model=Net, loss=gradient_penalty, update=update_after(nothing, first=1)),
    "after_the_step": Case(
        model=Net, loss=gradient_penalty, update=update_after(nothing, inside=False)
    ),
    "clipped_between": Case(model=Net, loss=gradient_penalty, update=update_after(clip)),
    "scaled_between": Case(model=Net, loss=gradient_penalty, update=update_after(halve)),
    "one_graph_twice": Case(model=Net, loss=gradient_penalty, update=retained),
    "gradient_of_a_leaf": Case(model=Net, loss=penalty_of_blocks, update=halves),
    "third_derivative": Case(model=Net, loss=third_derivative, update=halves),
    "recomputed": Case(model=Recomputing, loss=gradient_penalty, update=halves),
    "objects": Case(model=TellingNet, update=halves),
    "weights_outside": Case(model=Net, loss=norm_of_weights, update=halves),
}


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_a_second_backward_of_a_step_finds_the_parameters(name: str) -> None:
    check(CASES[name], stage=3, num_ranks=2)


def test_weights_clamped_after_the_backwards_stay_clamped() -> None:
    """The parameters are full then, whose edits have to reach the shards."""

    def clamped(session: Session, loss: Loss, batch: Tensor) -> Tensor:
        session.optimizer.zero_grad()
        with session.step():
            losses = [loss(session.model, batch), loss(session.model, 2 * batch)]
            for one in losses:
                session.backward(one)
            for param in session.model.parameters():
                param.data.clamp_(-0.2, 0.2)
            session.optimizer.step()
        return losses[0] + losses[1]

    check(Case(model=Net, loss=gradient_penalty, update=clamped), stage=3, num_ranks=2)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", [Net, Recomputing])
def test_a_graph_of_updated_parameters_is_refused_by_torch(model: type[Net]) -> None:
    """As on one device; a rank that has nothing of some parameter must tell, too."""

    def step(session: Session) -> None:
        session.optimizer.step()

    def of_blocks(module: nn.Module) -> torch.optim.Optimizer:
        blocks: nn.Module = module.blocks
        return torch.optim.SGD(blocks.parameters(), lr=0.1)

    case = Case(model=model, loss=gradient_penalty, update=update_after(step), optimizer=of_blocks)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_on_ranks(case, stage=3, num_ranks=2)


def test_blocks_are_given_back_when_they_are_updated_or_the_step_ends() -> None:
    def fn(rank: int) -> list[list[int]]:
        engine, seen = make_engine(Net()), []
        optimizer = torch.optim.SGD(engine.model.blocks[0].parameters(), lr=0.1)
        sharded = ShardedOptimizer(optimizer, engine)
        with engine.step():
            losses = [gradient_penalty(engine.model, torch.ones(2, 4)) for _ in range(2)]
            for loss in losses:
                with engine.backward():
                    loss.backward()
            seen.append(full_bytes(engine)[:3])
            optimizer.step()
            seen.append(full_bytes(engine)[:3])
        seen.append(full_bytes(engine)[:3])
        sharded.detach()
        return seen

    for inside, updated, after in run_ranks(fn, 2):
        assert all(inside)
        assert [bool(one) for one in updated] == [False, True, True]
        assert after == [0] * 3


class TwoOptimizers(Stack):
    """The update of one half comes between a penalty of the other and its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.others = nn.ModuleList(StackBlock() for _ in range(4))
        self.double()

    def penalty(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x = x.double().repeat(1, 2).requires_grad_()
        out = x
        for block in blocks:
            out = block(out)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out.square().mean() + grad.square().sum(1).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses = [self.penalty(blocks, batch[0]) for blocks in (self.blocks, self.others)]
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return (losses[0] + losses[1]).detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = self.blocks, self.others
        return [torch.optim.SGD(blocks.parameters(), lr=0.01) for blocks in halves]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_mb", [1e-4, 25])  # with 25, both halves are in one unit
def test_an_update_of_others_leaves_a_graph_its_parameters(bucket_mb: float) -> None:
    alone = fit(TwoOptimizers, max_epochs=1)
    strategy = ZeRO3Strategy(backend="in_process", bucket_mb=bucket_mb)
    got = fit(TwoOptimizers, strategy, devices=2, max_epochs=1)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-9, atol=1e-9)
