"""PowerSGD with factors in bfloat16: half the bytes, and rounding is made up for."""

import pytest
import torch
from torch import Tensor

from lightning_shard.core.layout import build_layout
from lightning_shard.data_parallel.compression import FlatBuffer, PowerSGD
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import (
    average,
    full,
    gradient,
    make_exchange,
    mean,
    state_of,
    world,
)

ENDS = [True, False]  # each rank keeps all, or its own segment
ROUNDING = 2**-8  # bfloat16's, relative to the value


def bfloat16(rank: int = 2) -> PowerSGD:
    return PowerSGD(rank=rank, factor_dtype="bfloat16")


@pytest.mark.parametrize("keeps_all", ENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_rank_rounds_off_it_sends_later(num_ranks: int, keeps_all: bool) -> None:
    """All ranks have the same values, so that their average is in bfloat16 as it is."""

    def fn(rank: int) -> None:
        exchange = make_exchange(bfloat16(), keeps_all=keeps_all)
        buffer = exchange.buffer
        steps = [average(exchange, gradient(buffer, 0, step)) for step in range(8)]
        sent = buffer.views(full(exchange, torch.stack(steps).sum(0)))
        kept = state_of(exchange)["residual"]
        for name, exact in buffer.views(mean(buffer, range(8), 1)).items():
            torch.testing.assert_close(sent[name] + kept[name], exact, rtol=1e-4, atol=1e-4)

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize("keeps_all", ENDS)
def test_ranks_that_differ_lose_the_averages_rounding_alone(keeps_all: bool) -> None:
    """Large values cancel between ranks: what each rounds off of them is far above that."""

    def fn(rank: int) -> None:
        exchange = make_exchange(bfloat16(), keeps_all=keeps_all)
        buffer = exchange.buffer
        grads = [gradient(buffer, r, step) for r in range(3) for step in range(8)]
        large = 1000 * (rank - 1) * gradient(buffer, 3, 0)
        steps = [average(exchange, grads[8 * rank + step] + large) for step in range(8)]
        sent = buffer.views(full(exchange, torch.stack(steps).sum(0)))
        kept, size = state_of(exchange)["residual"], full(exchange, torch.stack(steps).abs().sum(0))
        for name, exact in buffer.views(torch.stack(grads).sum(0) / 3).items():
            off = (sent[name] + kept[name] - exact).norm()
            assert off <= ROUNDING * buffer.views(size)[name].norm()

    run_ranks(fn, 3)


def test_factors_are_close_to_those_in_float32() -> None:
    def fn(rank: int) -> None:
        plain = make_exchange(PowerSGD(rank=2), keeps_all=True)
        rounded = make_exchange(bfloat16(), keeps_all=True)
        for step in range(3):
            values = gradient(plain.buffer, rank, step)
            off = average(rounded, values) - (exact := average(plain, values))
            assert 0 < off.norm() <= 0.05 * exact.norm()

    run_ranks(fn, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_message_is_half_as_long(num_ranks: int) -> None:
    def sent(rank: int, settings: PowerSGD) -> tuple[int, int]:
        layout = build_layout([("w", (2048, 512)), ("b", (512,))], num_shards=1)
        ranks = world("in_process")
        exchange = settings.exchange(FlatBuffer(layout=layout, ranks=ranks))
        before = sum(one.bytes for one in ranks.traffic.values())
        average(exchange, gradient(exchange.buffer, rank, 0))
        wire = sum(one.bytes for one in ranks.traffic.values()) - before
        return wire, exchange.tally.sent_bytes

    def fn(rank: int) -> None:
        full, half = sent(rank, PowerSGD()), sent(rank, bfloat16())
        assert half[0] == half[1]  # the tally's is the wire's
        assert half[0] <= 0.51 * full[0]

    run_ranks(fn, num_ranks)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0, 4), (64, 64)])
def test_a_buffer_may_have_vectors_or_matrices_alone(shape: tuple[int, ...]) -> None:
    def fn(rank: int) -> Tensor:
        layout = build_layout([("only", shape)], num_shards=1)
        exchange = bfloat16().exchange(FlatBuffer(layout=layout, ranks=world("in_process")))
        return average(exchange, gradient(exchange.buffer, rank, 0))

    first, second = run_ranks(fn, 2)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_a_value_above_bfloat16s_greatest_is_an_overflow_to_all() -> None:
    """It is finite in float32; nothing of it is kept, and the next average is sound."""

    def fn(rank: int) -> None:
        exchange = make_exchange(bfloat16(), keeps_all=True)
        values = gradient(exchange.buffer, rank, 0)
        if rank:
            exchange.buffer.views(values)["vector"][0] = torch.finfo(torch.float32).max
        assert average(exchange, values).isnan().all()
        assert not any(one.any() for one in state_of(exchange)["residual"].values())
        assert average(exchange, gradient(exchange.buffer, rank, 1)).isfinite().all()

    run_ranks(fn, 2)


def test_a_dtype_that_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="got 'float16'"):
        PowerSGD(factor_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a warm-up"):
        PowerSGD(adam=True)
