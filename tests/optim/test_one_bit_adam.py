"""One-bit Adam against its paper's algorithm 1, written here from its equations in numpy.

    x_t+1 = x_t - lr m_t / (sqrt(v) + eps)                   v of the warm-up's end
    rank i   m_i = b m_t-1 + (1 - b) g_i       sent_i = C(m_i + d_i)       d_i += m_i - sent_i
    server   mean = avg(sent_i) + d            m_t = C(mean)               d = mean - m_t

Each rank is the server of one segment. C has one scale, the mean magnitude, for a block of a
segment. Source: arXiv:2102.02888.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.compression import OneBit
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import engine_of

WARMUP, NUM_STEPS, LR, EPS, BETAS, BLOCK = 3, 8, 0.01, 1e-8, (0.8, 0.95), 1024
NUMEL = 8192
Array = np.ndarray[Any, Any]


def first_weights() -> Array:
    return np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)


def gradient(weights: Array, step: int, rank: int) -> Array:
    """Of a quadratic, with noise of each rank's own, and another size in each block."""
    noise = np.random.default_rng(1000 * step + rank).standard_normal(NUMEL)
    sizes = np.repeat(10.0 ** np.arange(NUMEL // BLOCK) / 1e4, BLOCK)
    return ((weights + noise) * sizes).astype(np.float32)


def one_bit(values: Array) -> Array:
    """Signs, and the mean magnitude of each block."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).mean(axis=1, keepdims=True)
    return (np.where(blocks >= 0, 1.0, -1.0) * scales).reshape(-1).astype(np.float32)


def paper(num_ranks: int) -> list[Array]:
    """Return the weights after each step."""
    x, m, v = first_weights(), np.zeros(NUMEL), np.zeros(NUMEL)
    lost, lost_by_server = np.zeros((num_ranks, NUMEL), np.float32), np.zeros(NUMEL, np.float32)
    way = []
    for step in range(NUM_STEPS):
        grads = np.stack([gradient(x, step, rank) for rank in range(num_ranks)])
        if step < WARMUP:  # torch's Adam, with its corrections
            g = grads.mean(0)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            m_hat, v_hat = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
        else:
            own = (BETAS[0] * m + (1 - BETAS[0]) * grads).astype(np.float32)
            sent = np.stack([one_bit(one) for one in own + lost])
            lost += own - sent
            mean = sent.mean(0) + lost_by_server
            m_hat = m = one_bit(mean)
            lost_by_server = mean - m
        x = (x - LR * m_hat / (np.sqrt(v_hat) + EPS)).astype(np.float32)
        way.append(x)
    return way


class Free(nn.Module):
    """Nothing but weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.from_numpy(first_weights()))


def engine_way(num_ranks: int, **options: Any) -> list[list[Tensor]]:
    def fn(rank: int) -> list[Tensor]:
        compression = OneBit(warmup_steps=WARMUP, block=BLOCK, **options)
        model, way = Free(), list[Tensor]()
        engine = engine_of(model, stage=0, compression=compression)
        adam = torch.optim.Adam(model.parameters(), lr=LR, betas=BETAS, eps=EPS)
        ShardedOptimizer(adam, engine)
        for step in range(NUM_STEPS):
            adam.zero_grad()
            grad = torch.from_numpy(gradient(model.weights.detach().numpy(), step, rank))
            with engine.step():
                loss = (model.weights * grad).sum()
            with engine.backward():
                loss.backward()
            adam.step()
            way.append(model.weights.detach().clone())
        return way

    return run_ranks(fn, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_a_limit_it_is_the_papers(num_ranks: int) -> None:
    expected = paper(num_ranks)
    for way in engine_way(num_ranks, update_limit=None):
        for got, weights in zip(way, expected, strict=True):
            torch.testing.assert_close(got, torch.from_numpy(weights), rtol=1e-5, atol=1e-5)


def test_an_update_is_limited_to_so_many_learning_rates() -> None:
    changes = {}
    for limit in (0.5, 1.0):
        way = engine_way(2, update_limit=limit)[0]
        changes[limit] = max(
            (after - before).abs().max().item()
            for before, after in zip(way[WARMUP - 1 :], way[WARMUP:], strict=False)
        )
    assert changes == pytest.approx({0.5: 0.5 * LR, 1.0: LR}, rel=1e-3)
