"""Ranks that use other parameters of the same blocks: the same reductions, in one order."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies

NUM_BLOCKS, WIDTH, NUM_STEPS = 4, 4, 2
Use = tuple[int, ...] | None  # numbers of a block's experts; None for no parameter at all
ALL: list[Use] = [(0, 1)] * NUM_BLOCKS
SOME: list[Use] = [(1,), (0, 1), (), (0,)]
OTHERS: list[Use] = [(), (1,), (0, 1), (1,)]
FIRST_UNUSED: list[Use] = [None, (0,), (1,), (0,)]
ONE_UNUSED: list[Use] = [(0,), (0,), None, (1,)]
LAST_UNUSED: list[Use] = [(0,), (0,), None, None]


class Mixture(nn.Module):
    """Experts, of which a call uses some, beside what each call uses."""

    def __init__(self, *, passes: bool) -> None:
        super().__init__()
        self.passes = passes
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, use: Use) -> Tensor:
        if use is None:
            return x if x.requires_grad and self.passes else torch.zeros_like(x)
        y = torch.tanh(self.shared(x))
        for expert in use:
            y = y + torch.tanh(self.experts[expert](x))
        return y


class Meets(torch.autograd.Function):
    """Waits for all ranks in backward, as batch norms over all ranks do."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return grad


class Net(nn.Module):
    """Blocks on raw features: one after another, or beside each other."""

    def __init__(
        self,
        *,
        beside: bool = False,
        frozen: bool = False,
        meets: bool = False,
        passes: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.beside, self.meets = beside, meets
        self.blocks = nn.ModuleList(Mixture(passes=passes) for _ in range(NUM_BLOCKS))
        self.blocks[0].requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, uses: Sequence[Use]) -> Tensor:
        y = x
        for block, use in zip(self.blocks, uses, strict=True):
            y = y + block(x if self.beside else y, use)
            y = Meets.apply(y) if self.meets else y
        return self.head(y).square().mean()  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def on_one_device(model: nn.Module, uses: Sequence[Sequence[Use]]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank, use in enumerate(uses):
            (model(batch(step, rank), use) / len(uses)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def on_ranks(
    make: partial[Net], uses: Sequence[Sequence[Use]], *, stage: int, num_copies: int = 1
) -> list[list[Tensor]]:
    def fn(rank: int) -> list[Tensor]:
        model = make()
        options = EngineOptions(stage=stage, bucket_mb=1e-6, waits_in_backward=model.meets)
        engine = DataParallelEngine(model, in_copies(num_copies), options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            with engine.step():
                loss = model(batch(step, rank), uses[rank])
            with engine.backward():
                loss.backward()
            with engine.optimizer_view():
                optimizer.step()
            engine.publish(model.parameters())
        engine.detach(restore=True)
        return [param.detach().clone() for param in model.parameters()]

    return run_ranks(fn, len(uses))


@pytest.mark.parametrize("second", [SOME, FIRST_UNUSED, ONE_UNUSED, LAST_UNUSED])
@pytest.mark.parametrize("first", [ALL, OTHERS])
@pytest.mark.parametrize("kind", [{}, {"beside": True}, {"frozen": True}, {"passes": True}])
def test_ranks_use_other_parameters_of_blocks_on_raw_features(
    kind: dict[str, bool], first: list[Use], second: list[Use]
) -> None:
    """Blocks without a gradient of their input were reduced when they were complete on a rank.

    Others reduced them after those outside of all blocks. And a block of which a rank had used
    nothing at all was not unsharded there in backward, for which the others waited.
    """
    make = partial(Net, **kind)
    expected = on_one_device(make(), [first, second])
    for weights in on_ranks(make, [first, second], stage=3):
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_use_other_parameters_of_blocks_on_raw_features(stage: int) -> None:
    uses = [ALL, SOME, OTHERS, FIRST_UNUSED]
    expected = on_one_device(Net(), uses)
    for weights in on_ranks(partial(Net), uses, stage=stage, num_copies=2):
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_use_other_parameters_meet_in_backward(stage: int) -> None:
    """A rank waited for a reduction while the other waited for it to meet: for ever."""
    make = partial(Net, meets=True)
    expected = on_one_device(make(), [ALL, SOME])
    for weights in on_ranks(make, [ALL, SOME], stage=stage):
        torch.testing.assert_close(weights, expected)
