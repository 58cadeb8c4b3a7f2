"""Rows reach their experts and come back, whatever each rank has for each expert."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.batched import BatchedExperts
from lightning_shard.expert_parallel.exchange import Routes
from lightning_shard.expert_parallel.finding import find_mixtures
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

WIDTH = 3


class Experts(nn.Module):
    """A matrix for each expert; entries of no expert give zeros, as Hugging Face's do."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(num_experts, WIDTH, WIDTH, generator=generator))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_there = (top_k_index < self.num_experts).unsqueeze(-1)
        matrices = self.weight[top_k_index.clamp(max=self.num_experts - 1)]  # (T, K, H, H)
        results = (x[:, None, None] @ matrices).squeeze(2)
        return (results.tanh() * top_k_weights.unsqueeze(-1) * is_there).sum(1)


@st.composite
def routings(draw: Any) -> tuple[int, list[list[list[int]]]]:
    """Return the number of experts, and the experts of each token of each rank; few of each."""
    num_ranks = draw(st.sampled_from([2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 3))
    num_each = draw(st.integers(1, 2))
    used = draw(st.lists(st.integers(0, num_experts), min_size=1, unique=True))  # the last: none
    token = st.lists(st.sampled_from(used), min_size=num_each, max_size=num_each)
    tokens = st.lists(token, max_size=5)
    ranks = draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks))
    return num_experts, [[one or [num_experts] * num_each for one in rank] for rank in ranks]


def inputs_of(rank: int, chosen: list[list[int]], num_each: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(len(chosen), WIDTH, generator=generator, requires_grad=True)
    weights = torch.rand(len(chosen), num_each, generator=generator, requires_grad=True)
    return x, torch.tensor(chosen, dtype=torch.int64).view(len(chosen), num_each), weights


@pytest.mark.slow
@settings(max_examples=40)
@given(routing=routings())
def test_any_counts_of_tokens_give_what_all_experts_give(
    routing: tuple[int, list[list[list[int]]]],
) -> None:
    num_experts, ranks = routing
    num_each = max((len(one) for rank in ranks for one in rank), default=1)
    expected, whole = [], Experts(num_experts)
    for rank, chosen in enumerate(ranks):
        x, index, weights = inputs_of(rank, chosen, num_each)
        result = whole(x, index, weights)
        (result * torch.arange(1.0, WIDTH + 1)).sum().backward()
        expected.append((result.detach(), x.grad, weights.grad))
    assert whole.weight.grad is not None or not any(ranks)

    def of_rank(rank: int) -> tuple[Any, ...]:
        group = all_ranks()
        module = Experts(num_experts)
        (mixture,) = find_mixtures(nn.ModuleList([module]))
        calls = BatchedExperts(mixture, group)
        module.weight = nn.Parameter(module.weight.detach().chunk(group.size)[rank].clone())
        x, index, weights = inputs_of(rank, ranks[rank], num_each)
        result = calls.call(module, module.forward, (x, index), {"top_k_weights": weights})
        (result * torch.arange(1.0, WIDTH + 1)).sum().backward()
        assert module.num_experts == num_experts
        return result.detach(), x.grad, weights.grad, module.weight.grad, calls.load

    found = run_ranks(of_rank, len(ranks))
    for own, other in zip(found, expected, strict=True):
        for one, two in zip(own[:3], other, strict=True):
            torch.testing.assert_close(one, two if two is not None else torch.zeros_like(one))
    mean = torch.cat([one[3] for one in found]) * len(ranks)  # a rank's is the mean of the ranks'
    full = torch.zeros_like(mean) if whole.weight.grad is None else whole.weight.grad
    torch.testing.assert_close(mean, full)
    num_sent = [sum(e < num_experts for token in rank for e in token) for rank in ranks]
    loads = [one[4] for one in found]
    assert [one.num_kept + one.num_sent_away for one in loads] == num_sent
    assert sum(int(one.received.sum()) for one in loads) == sum(num_sent)


def penalty(result: Tensor, x: Tensor) -> Tensor:
    """Return what depends on the gradient of an input."""
    (grad,) = torch.autograd.grad(result.tanh().sum(), x, create_graph=True)
    return grad.square().sum()


def test_a_second_derivative_is_not_scaled_by_the_number_of_ranks() -> None:
    """A second derivative was scaled by the number of ranks."""
    ranks, whole = [[[0, 1], [2, 3]], [[3, 0], [1, 2], [0, 2]]], Experts(4)
    expected = []
    for rank, chosen in enumerate(ranks):
        x, index, weights = inputs_of(rank, chosen, 2)
        penalty(whole(x, index, weights), x).backward()
        expected.append((x.grad, weights.grad))

    def of_rank(rank: int) -> tuple[Any, ...]:
        module = Experts(4)
        (mixture,) = find_mixtures(nn.ModuleList([module]))
        calls = BatchedExperts(mixture, all_ranks())
        module.weight = nn.Parameter(module.weight.detach().chunk(2)[rank].clone())
        x, index, weights = inputs_of(rank, ranks[rank], 2)
        result = calls.call(module, module.forward, (x, index), {"top_k_weights": weights})
        penalty(result, x).backward()
        return x.grad, weights.grad, module.weight.grad

    found = run_ranks(of_rank, 2)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own[:2], other, rtol=1e-4, atol=1e-6)
    mean = torch.cat([one[2] for one in found]) * 2
    torch.testing.assert_close(mean, whole.weight.grad, rtol=1e-4, atol=1e-6)


def test_what_travels_is_what_other_ranks_need() -> None:
    """Counts, then rows there and back: forward and backward move each row away twice."""
    counts = torch.tensor([[3, 0, 2, 1], [0, 0, 0, 4]])  # of ranks 0 and 1 for four experts

    def of_rank(rank: int) -> int:
        group = all_ranks()
        before = group.traffic.total_elements
        routes = Routes(counts[rank], group)
        rows = torch.ones(int(counts[rank].sum()), 5, requires_grad=True)
        (received,) = routes.to_experts(rows)
        (back,) = routes.to_tokens(received * 2)
        back.sum().backward()
        assert rows.grad is not None
        assert rows.grad.unique().tolist() == [2.0]
        return int(group.traffic.total_elements - before)

    assert run_ranks(of_rank, 2) == [2 + 5 * (3 + 0) * 2, 2 + 5 * (3 + 0) * 2]


def test_rows_by_expert_are_sorted_and_put_back() -> None:
    counts = torch.tensor([[1, 2, 0, 1], [2, 0, 1, 0]])

    def of_rank(rank: int) -> tuple[list[list[float]], list[float], list[int]]:
        routes = Routes(counts[rank], all_ranks())
        rows = torch.arange(float(counts[rank].sum())).view(-1, 1) + 10 * rank
        (received,) = routes.to_experts(rows)
        by_expert = routes.sorted_by_expert(received)
        again = routes.as_received(by_expert)
        assert torch.equal(again, received)
        (back,) = routes.to_tokens(again)
        assert torch.equal(back, rows)
        local = routes.local_experts().tolist()
        return [one.flatten().tolist() for one in by_expert], received.flatten().tolist(), local

    assert run_ranks(of_rank, 2) == [
        ([[0.0, 10.0, 11.0], [1.0, 2.0]], [0.0, 1.0, 2.0, 10.0, 11.0], [0, 1, 1, 0, 0]),
        ([[12.0], [3.0]], [3.0, 12.0], [1, 0]),
    ]


def test_without_a_token_anywhere_there_are_zeros() -> None:
    def of_rank(rank: int) -> tuple[int, ...]:
        module, group = Experts(2), all_ranks()
        (mixture,) = find_mixtures(nn.ModuleList([module]))
        module.weight = nn.Parameter(module.weight.detach()[rank : rank + 1].clone())
        calls = BatchedExperts(mixture, group)
        x, index, weights = inputs_of(rank, [], 2)
        result = calls.call(module, module.forward, (x, index, weights), {})
        result.sum().backward()
        assert module.weight.grad is not None
        assert not module.weight.grad.any()
        return tuple(result.shape)

    assert run_ranks(of_rank, 2) == [(0, WIDTH), (0, WIDTH)]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((torch.zeros(2, 3),), r"is called with \(2, 3\); expected tokens"),
        ((torch.zeros(2, 3), torch.zeros(2, 2)), r"is called with \(2, 3\), \(2, 2\); expected"),
    ],
)
def test_other_arguments_are_refused(args: tuple[Tensor, ...], told: str) -> None:
    module = Experts(2)
    (mixture,) = find_mixtures(nn.ModuleList([module]))

    def of_rank(rank: int) -> str:
        with pytest.raises(ConfigError, match=told) as caught:
            BatchedExperts(mixture, all_ranks()).call(module, module.forward, args, {})
        return str(caught.value)

    assert "Leave expert_parallel_size out" in run_ranks(of_rank, 2)[0]
