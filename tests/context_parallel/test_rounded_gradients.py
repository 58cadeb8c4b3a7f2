"""The trial of a block: a gradient that is all rounding is right, a small wrong one is not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.data_parallel.torch_private import in_backward
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

BATCH, LENGTH, WIDTH = 4, 64, 32


class Attention(nn.Module):
    """A key's bias moves all scores of a query alike, so that its gradient is zero."""

    def __init__(self, spread: float, *, normed: bool = False) -> None:
        super().__init__()
        self.normed = normed
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for param in self.parameters():
            nn.init.normal_(param, std=spread)

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x) if self.normed else x
        heads = (
            one(y).unflatten(-1, (2, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def _norm(self, x: Tensor) -> Tensor:
        """Norm in float32, whatever else is computed in, as many models do."""
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class OverPositions(nn.Module):
    """The bias cancels in a norm over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 30
        return x + self.last((y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1))


class Doubled(torch.autograd.Function):
    """Gives a gradient that is twice as large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        assert in_backward()
        return 2 * grad


class SmallAndWrong(Attention):
    """In parts, one gradient is wrong, which is far smaller than all others."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        is_part = isinstance(x, DimShardedTensor)
        shift = Doubled.apply(self.shift) if is_part else self.shift
        return super().forward(x) + shift * 1e-7


def called(make: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> None:
    """Call two blocks on two ranks, the first of which is tried."""

    def of_rank(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(make(), make())
        CutBlocks(model, all_ranks())
        x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            full_tensor(model(x))

    run_ranks(of_rank, 2)


@pytest.mark.filterwarnings("ignore:The block .* has no rule")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        OverPositions,
        *(partial(Attention, spread) for spread in (0.02, 0.2, 1.0)),
        partial(Attention, 0.2, normed=True),
    ],
)
def test_a_gradient_that_is_all_rounding_is_not_wrong(
    make: Callable[[], nn.Module], dtype: torch.dtype | None
) -> None:
    """It was compared with itself: a block with a key's bias was refused, by its weights' size."""
    called(make, dtype)


def test_a_wrong_gradient_is_found_beside_far_larger_ones() -> None:
    with pytest.raises(ConfigError, match="the gradient of 'shift' differs"):
        called(SmallAndWrong)


class OfOneFormat(Attention):
    """Has a wrong gradient in parts, and cannot compute in float64."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        is_part = isinstance(x, DimShardedTensor)
        return super().forward(x) + (Doubled.apply(self.shift) if is_part else self.shift)


def test_what_a_block_raises_where_it_is_tried_in_float64_is_told() -> None:
    """The refusal was of float32 alone, unsaid."""
    with pytest.raises(ConfigError, match=r"in float64 it raises TypeError: float32 only\)"):
        called(OfOneFormat)
