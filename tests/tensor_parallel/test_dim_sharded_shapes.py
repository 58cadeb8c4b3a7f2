"""Shapes and indices of tensors in parts: what stays sharded, and that nothing else can."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    Part,
    from_local,
    full_tensor,
)
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

B, T, HEADS, WIDTH = 2, 3, 4, 5
C = HEADS * WIDTH


def fused() -> Tensor:
    """Return (B, T, 3C): query, key and value."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, 3 * C, dtype=torch.double, generator=generator)


STAYS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {  # sharded dimension, and blocks
    "as it is": (lambda x: x * 2, 2, 3),
    "flatten of positions": (lambda x: x.flatten(0, 1), 1, 3),
    "split": (lambda x: x.split(C, dim=2)[1], 2, 1),
    "split by sizes": (lambda x: x.split([C, 2 * C], -1)[1], 2, 2),
    "chunk": (lambda x: x.chunk(3, dim=-1)[2], 2, 1),
    "slices": (lambda x: x[..., C : 2 * C], 2, 1),
    "a slice of two": (lambda x: x[:, 1:, C:], 2, 2),
    "heads": (lambda x: x[..., :C].view(B, T, HEADS, C // HEADS), 2, 1),
    "heads, unflatten": (lambda x: x[..., :C].unflatten(-1, (HEADS, -1)).mT, 3, 1),
    "blocks and heads": (lambda x: x.reshape(B, T, 3, HEADS, -1), 3, 1),
    "an iteration": (lambda x: list(x.view(B, T, 3, C).permute(2, 0, 1, 3))[1], 2, 1),
    "unbind": (lambda x: x.view(B, T, 3, HEADS, WIDTH).unbind(2)[0], 2, 1),
    "a number": (lambda x: x.view(B, T, 3, HEADS, WIDTH)[:, :, 1], 2, 1),
    "a number, permuted": (lambda x: x.view(B, T, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)[2], 1, 1),
    "a range of widths": (lambda x: x.view(B, T, 3, HEADS, WIDTH)[:, None, ..., 1:3], 4, 1),
    "back": (lambda x: x.view(B, T, 3, HEADS, WIDTH).flatten(3), 3, 1),
    "all the way back": (lambda x: x.view(B, T, 3, HEADS, WIDTH).flatten(2), 2, 3),
    "heads with the batch": (
        lambda x: x[..., :C].view(B, T, HEADS, WIDTH).transpose(1, 2).reshape(B * HEADS, T, WIDTH),
        0,
        B,
    ),
    "heads repeated": (
        lambda x: x[..., :C].unflatten(-1, (HEADS, -1)).repeat_interleave(2, 2),
        2,
        1,
    ),
    "heads expanded": (
        lambda x: (
            x[..., :C]
            .view(B, T, HEADS, 1, WIDTH)
            .expand(B, T, HEADS, 2, WIDTH)
            .reshape(B, T, 2 * HEADS, WIDTH)
        ),
        2,
        1,
    ),
    "halves turned": (
        lambda x: torch.cat([-one for one in x.view(B, T, 3, HEADS, WIDTH).split(3, -1)], dim=-1),
        3,
        1,
    ),
    "pairs": (
        lambda x: torch.view_as_real(
            torch.view_as_complex(
                x.view(B, T, 3, HEADS, WIDTH)[..., :4].unflatten(-1, (2, 2)).clone()
            )
            * torch.tensor(1j)
        ),
        3,
        1,
    ),
    "einsum with an ellipsis": (
        lambda x: torch.einsum(
            "...hw,vw->...hv", x.view(B, T, 3, HEADS, WIDTH), torch.eye(2, WIDTH).double()
        ),
        3,
        1,
    ),
    "einsum of a list": (
        lambda x: torch.einsum(
            "btkhw,h->bthk", [x.view(B, T, 3, HEADS, WIDTH), torch.arange(4.0).double()]
        ),
        2,
        1,
    ),
    "one of a kind with whole ones": (
        lambda x: torch.cat([x, torch.zeros(B, T, 3 * C)]),
        2,
        3,
    ),
}

GATHERED: dict[str, Callable[[Tensor], Any]] = {
    "a split across blocks": lambda x: x.split(C // 2, dim=2)[1],
    "a slice across blocks": lambda x: x[..., 1 : C + 1],
    "heads of three at once": lambda x: x.view(B, T, HEADS, 3, WIDTH),
    "heads that the ranks cannot share": lambda x: x.view(B, T, 3, WIDTH, HEADS),
    "an iteration over heads": lambda x: list(x.view(B, T, 3, HEADS, WIDTH)[0, 0, 0])[1],
    "a mean of all": lambda x: x.mean(-1),
}


def applied(function: Callable[[Tensor], Tensor], keep: tuple[int, int] | None) -> None:
    """Compare values and gradients, full and in parts, where it must stay so or not."""
    full = fused().requires_grad_()
    expected = function(full * 1)
    factors = torch.linspace(1, 2, expected.numel(), dtype=torch.double).view_as(expected)
    (gradient,) = torch.autograd.grad((expected * factors).sum(), full)

    def fn(rank: int) -> None:
        group = all_ranks()
        part = Part(local=fused(), dim=2, group=group, num_blocks=3)
        local = part.narrow(fused()).clone().requires_grad_()
        result = function(from_local(local * 1, group, -1, 3))
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert ("all_gather" in group.traffic) == (keep is None)
        if keep is not None:
            assert isinstance(result, DimShardedTensor)
            assert (result.part.dim, result.part.num_blocks) == keep
        torch.testing.assert_close(full_tensor(result.detach()), expected.detach())
        (result * factors).sum().backward()
        torch.testing.assert_close(local.grad, part.narrow(gradient))

    run_ranks(fn, 2)


@pytest.mark.parametrize("name", STAYS)
def test_fused_projections_stay_in_parts(name: str) -> None:
    function, dim, num_blocks = STAYS[name]
    applied(function, (dim, num_blocks))


@pytest.mark.parametrize("name", GATHERED)
def test_what_cuts_through_parts_is_of_the_gathered_full(name: str) -> None:
    applied(GATHERED[name], None)


SIZES = st.sampled_from([1, 2, 3, 4])


def arrangements(num_values: int) -> st.SearchStrategy[list[int]]:
    """Shapes of so many values, with up to four dimensions."""
    divisors = [n for n in range(1, num_values + 1) if num_values % n == 0]
    return (
        st.lists(st.sampled_from(divisors), min_size=0, max_size=3)
        .filter(lambda sizes: num_values % math.prod(sizes) == 0)
        .map(lambda sizes: [*sizes, num_values // math.prod(sizes)])
    )


@given(st.data())
def test_a_view_stays_in_parts_wherever_a_dimension_has_the_same_parts(data: st.DataObject) -> None:
    shape = data.draw(st.lists(SIZES, min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    num_blocks = data.draw(SIZES)
    shape[dim] *= 2 * num_blocks
    target = data.draw(arrangements(math.prod(shape)))
    values = torch.arange(math.prod(shape))

    def own(rank: int, sizes: list[int], dim: int, num_blocks: int) -> Tensor:
        group = cast(Collectives, SimpleNamespace(rank=rank, size=2))
        part = Part(local=values, dim=dim, group=group, num_blocks=num_blocks)
        return cast(Tensor, part.narrow(values.view(sizes)))

    group = cast(Collectives, SimpleNamespace(rank=1, size=2))
    local = own(1, shape, dim, num_blocks)
    try:
        result = from_local(local.contiguous(), group, dim, num_blocks).reshape(target)
    except AttributeError:  # there is nobody to gather from
        for place, size in enumerate(target):
            for blocks in range(1, size // 2 + 1):
                if size % (2 * blocks) == 0:
                    assert not torch.equal(own(1, target, place, blocks).flatten(), local.flatten())
    else:
        assert isinstance(result, DimShardedTensor)
        assert result.shape == tuple(target)
        part = result.part
        for rank in range(2):
            values_of_rank = own(rank, target, part.dim, part.num_blocks).flatten()
            assert torch.equal(values_of_rank, own(rank, shape, dim, num_blocks).flatten())
        assert torch.equal(part.local, own(1, target, part.dim, part.num_blocks))
