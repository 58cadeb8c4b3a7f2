"""Blocks of all kinds are computed in parts, without a trial, as of the full sequence."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.testing import run_ranks
from tests.context_parallel.zoo import attention, features, mixing
from tests.context_parallel.zoo.layers import BATCH, WIDTH, Forward, Layers
from tests.groups import all_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The block .* which has no rule")
FORWARDS = {**attention.FORWARDS, **mixing.FORWARDS, **features.FORWARDS}
# A score that differs in float64's last digit may round to another float32.
IN_FLOAT32 = {"written_out_rel_bias"}
SIZES = [(16, 2), (13, 3), (16, 4), (11, 8)]  # positions and ranks


class Model(nn.Module):
    """Two blocks with a forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()

        class Block(Layers):
            def forward(self, x: Tensor) -> Tensor:
                return forward(self, x)

        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def results(model: Model, x: Tensor) -> list[Tensor]:
    """Return a loss that looks at all positions differently, and every gradient."""
    torch.manual_seed(1)
    y = model(x)
    loss = (y * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() + y.square().mean()
    loss = full_tensor(loss + sum(getattr(block, "aux", 0.0) for block in model.blocks))
    loss.backward()
    sources = [x, *model.parameters()]
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in sources]
    return [loss.detach(), *(full_tensor(one).detach().clone() for one in grads)]


def compare(name: str, length: int, num_ranks: int) -> set[str]:
    """Compare with the full sequence; return the operations that needed all of it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64)
    expected = results(Model(FORWARDS[name]), x.clone().requires_grad_())

    def of_rank(rank: int) -> tuple[list[Tensor], set[str]]:
        model, ranks = Model(FORWARDS[name]), all_ranks()
        cut = CutBlocks(model, ranks, tries=False)
        found = results(model, x.clone().requires_grad_())
        for grad in found[2:]:
            ranks.all_reduce(grad, "avg")
        return found, set(cut.in_full.noted)

    ranks = run_ranks(of_rank, num_ranks)
    for found, _ in ranks:
        for one, other in zip(found, expected, strict=True):
            scale = max(other.abs().max().item(), 1e-3)
            atol = 1e-7 if name in IN_FLOAT32 else 1e-9
            torch.testing.assert_close(one, other, rtol=1e-7, atol=atol * scale)
    return ranks[0][1]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(("length", "num_ranks"), SIZES)
@pytest.mark.parametrize("name", FORWARDS)
def test_it_is_that_of_the_full_sequence(name: str, length: int, num_ranks: int) -> None:
    noted = compare(name, length, num_ranks)
    if name in features.FORWARDS:  # which need no other position
        assert not noted
