"""Attention in a ring equals that of the full sequence, sends what theory says, is balanced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_shard.backends.traffic import Traffic
from lightning_shard.context_parallel import attention
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.testing import run_ranks
from tests.context_parallel.test_attention import drawn, in_parts, mean

BATCH, LENGTH, WIDTH = 2, 24, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-5)
PACKED = torch.block_diag(torch.ones(7, 7), torch.ones(12, 12), torch.ones(5, 5)).bool()
PADDED = (torch.arange(LENGTH) < torch.tensor([[24], [13]]))[:, None, None, :]
PADDED_IN_FRONT = CAUSAL & (torch.arange(LENGTH) >= torch.tensor([[0], [7]]))[:, None, None, :]
ADDED = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~WINDOW, -torch.inf)
OF_HEADS = drawn(6, LENGTH, LENGTH).detach()
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "sliding window": {"attn_mask": WINDOW},
    "packed": {"attn_mask": PACKED & CAUSAL},
    "packed, both ways": {"attn_mask": PACKED},
    "padded": {"attn_mask": PADDED},
    "rows that see nothing": {"attn_mask": PADDED_IN_FRONT},
    "an added window": {"attn_mask": ADDED},
    "a scale": {"is_causal": True, "scale": 0.3},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's rows and keys are several tiles, and a part of one."""
    monkeypatch.setattr(attention, "_TILE", 4)


def inputs(heads: int, key_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(BATCH, one, LENGTH, WIDTH) for one in (heads, key_heads, key_heads)]
    return [
        drawn(*shape, seed=seed).detach().to(dtype).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def results(tensors: list[Tensor], of: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    result = full_tensor(F.scaled_dot_product_attention(*tensors, **options))
    direction = drawn(*result.shape, seed=9).detach().to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, of, direction)]


def assert_equal_to_full(
    num_ranks: int, own: list[Tensor], options: dict[str, Any], **tolerance: float
) -> None:
    expected = results(own, own, options)

    def of_rank(rank: int) -> list[Tensor]:
        sources = [one.detach().requires_grad_() for one in own]
        parts, _ = in_parts(sources, 2)
        result, *grads = results(parts, sources, options)
        return [result, *(mean(one.contiguous()) for one in grads)]

    for found in run_ranks(of_rank, num_ranks):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **tolerance)


@pytest.fixture
def no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a ring can do is not done with gathered keys."""

    def refuse(*_: Any) -> None:
        pytest.fail("the keys were gathered")

    monkeypatch.setattr(attention, "_by_rows", refuse)


@pytest.mark.usefixtures("small_tiles", "no_gathering")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("num_ranks", "heads", "key_heads"),
    [
        pytest.param(2, 1, 1, id="ring of 2"),
        pytest.param(3, 4, 2, id="ring of 3, grouped"),
        pytest.param(4, 3, 1, id="ring of 4, one head of keys"),
        pytest.param(4, 6, 3, id="rings of 2, heads on 2, grouped"),
        pytest.param(6, 4, 4, id="rings of 3, heads on 2"),
        pytest.param(8, 5, 5, id="ring of 8, an odd number of rows each"),
        pytest.param(5, 2, 2, id="ring of 5, rows short of one"),
        pytest.param(7, 3, 3, id="ring of 7, rows short of four"),
        pytest.param(10, 4, 2, id="rings of 5, heads on 2, a rank without a row"),
    ],
)
def test_it_equals_that_of_the_full_sequence(
    num_ranks: int, heads: int, key_heads: int, mask: str
) -> None:
    options = MASKS[mask] | {"enable_gqa": heads != key_heads}
    assert_equal_to_full(num_ranks, inputs(heads, key_heads), options, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("small_tiles", "no_gathering")
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_mask_of_each_head_goes_with_its_heads(num_ranks: int) -> None:
    options = {"attn_mask": OF_HEADS, "enable_gqa": True}
    assert_equal_to_full(num_ranks, inputs(6, 2), options, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("no_gathering")
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-12), (torch.bfloat16, 2e-2, 4e-2)]
)
def test_other_formats_are_summed_in_float32_or_wider(
    dtype: torch.dtype, rtol: float, atol: float
) -> None:
    assert_equal_to_full(4, inputs(3, 3, dtype), {"is_causal": True}, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attn_mask": drawn(LENGTH, LENGTH)}, id="a bias that learns"),
        pytest.param({"dropout_p": 0.5}, id="dropout"),
    ],
)
def test_what_a_ring_cannot_do_gets_gathered_keys(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    by_rows: Callable[..., Any] = attention._by_rows
    monkeypatch.setattr(
        attention, "_by_rows", lambda *args: (called.append(True), by_rows(*args))[1]
    )

    def of_rank(rank: int) -> None:
        parts, _ = in_parts(inputs(1, 1), 2)
        F.scaled_dot_product_attention(*parts, **options)

    run_ranks(of_rank, 2)
    assert called == [True, True]


def moved_runs(num_ranks: int, rank: int) -> int:
    """Return how many of a rank's two runs of rows go to another rank to balance a ring."""
    wanted = [min(run, 2 * num_ranks - 1 - run) for run in (2 * rank, 2 * rank + 1)]
    return sum(one != rank for one in wanted)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_a_ring_sends_keys_and_values_twice_and_their_gradients_once(
    num_ranks: int, options: dict[str, Any]
) -> None:
    heads, key_heads = 5, 1

    def of_rank(rank: int) -> int:
        sources = inputs(heads, key_heads)
        parts, _ = in_parts(sources, 2)
        traffic: Traffic = parts[0]._part.group.traffic
        before = traffic.snapshot()
        result = F.scaled_dot_product_attention(*parts, enable_gqa=True, **options)
        local = [one._part.local for one in parts]
        torch.autograd.grad(result._part.local.sum(), local)
        after = traffic.snapshot()
        assert {name for name in after if after[name] != before.get(name)} == {"all_to_all"}
        return after["all_to_all"].elements - (
            before["all_to_all"].elements if "all_to_all" in before else 0
        )

    rows = BATCH * LENGTH // num_ranks * WIDTH
    keys = 2 * key_heads * rows * (num_ranks - 1)
    for rank, sent in enumerate(run_ranks(of_rank, num_ranks)):
        # query, key, value in and the result out, and as much of gradients
        balancing = 2 * (heads + 2 * key_heads + heads) * rows // 2 * moved_runs(num_ranks, rank)
        assert sent == 3 * keys + (balancing if options else 0)


def test_causal_ranks_have_equally_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TILE", 3)
    scores: Callable[..., Any] = attention.TiledAttention._scores
    counts: dict[int, int] = {}

    def counting(self: Any, *args: Any) -> Any:
        for one in scores(self, *args):
            rank = torch.distributed.get_rank()
            counts[rank] = counts.get(rank, 0) + 1
            yield one

    monkeypatch.setattr(attention.TiledAttention, "_scores", counting)

    def of_rank(rank: int) -> None:
        parts, _ = in_parts(inputs(1, 1), 2)
        F.scaled_dot_product_attention(*parts, is_causal=True)

    run_ranks(of_rank, 4)
    # Each rank has an early and a late run of 3 rows, 9 of the 36 pairs of runs with two halves.
    assert counts == dict.fromkeys(range(4), 9)


def test_no_matrix_of_all_scores_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TILE", 4)
    largest: list[int] = []
    masked: Callable[..., Tensor] = attention.TiledAttention._masked

    def measuring(self: Any, scores: Tensor, *args: Any) -> Tensor:
        largest.append(scores.numel())
        return masked(self, scores, *args)

    monkeypatch.setattr(attention.TiledAttention, "_masked", measuring)

    def of_rank(rank: int) -> None:
        sources = inputs(1, 1)
        parts, _ = in_parts(sources, 2)
        results(parts, sources, {})

    run_ranks(of_rank, 2)
    assert max(largest) == BATCH * 4 * 4


@pytest.mark.usefixtures("small_tiles", "no_gathering")
def test_a_second_derivative_of_a_ring_is_refused() -> None:
    """A gradient was a constant to a second derivative."""
    own = inputs(1, 1)

    def of_rank(rank: int) -> None:
        sources = [one.detach().requires_grad_() for one in own]
        parts, _ = in_parts(sources, 2)
        result = F.scaled_dot_product_attention(*parts, is_causal=True)
        grads = torch.autograd.grad(full_tensor(result).sum(), sources, create_graph=True)
        with pytest.raises(ConfigError, match="is differentiated once more"):
            sum(one.square().sum() for one in grads).backward()

    run_ranks(of_rank, 2)
