"""Where a backward starts the halves of compressed reductions."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.compression import COMPRESSORS, Compressor, OneBit
from lightning_shard.data_parallel.compression.compressor import Exchange
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.groups import engine_of


def make_engine(model: nn.Module, compression: Compressor, stage: int) -> DataParallelEngine:
    return engine_of(model, stage=stage, bucket_mb=1e-9, compression=compression)


def watch(engine: DataParallelEngine, events: list[str]) -> None:
    """Note what is asked of each exchange."""

    def noted(exchange: Exchange, name: str, number: int) -> None:
        method = getattr(exchange, name)

        def call(*args: object) -> None:
            events.append(f"{name} {number}")
            method(*args)

        setattr(exchange, name, call)

    for number, exchange in enumerate(engine.exchanges):
        for name in ("begin", "proceed", "wait"):
            noted(exchange, name, number)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("compression", ["int8", "powersgd"])
def test_both_halves_start_while_backward_runs(compression: str, stage: int) -> None:
    def fn(rank: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        engine, events = make_engine(model, COMPRESSORS[compression](), stage), []
        watch(engine, events)
        for _ in range(2):  # the first learns whether gradients come twice
            events.clear()
            with engine.step():
                loss = model(torch.ones(2, 8)).sum()
            with engine.backward():
                loss.backward()
                events.append("end")
        return events

    for events in run_ranks(fn, 2):
        assert events is not None
        during, after = events[: events.index("end")], events[events.index("end") + 1 :]
        started = [event for event in during if event.startswith("begin")]
        assert started == ["begin 2", "begin 1", "begin 0"]
        assert during.index("proceed 2") < during.index("begin 1")
        assert during.index("proceed 1") < during.index("begin 0")
        assert "wait 0" in after


def test_a_warm_up_is_dense() -> None:
    def fn(rank: int) -> tuple[int, int]:
        model = nn.Linear(64, 64)
        engine = make_engine(model, OneBit(warmup_steps=1), 0)
        sent = []
        for _ in range(2):
            before = engine.collectives.traffic.total_bytes
            with engine.step():
                loss = model(torch.ones(2, 64)).sum()
            with engine.backward():
                loss.backward()
            sent.append(engine.collectives.traffic.total_bytes - before)
        return sent[0], sent[1]

    dense, compressed = run_ranks(fn, 2)[0] or (0, 0)
    assert dense > 4 * 64 * 64
    assert compressed < dense / 10


def test_complex_gradients_are_refused() -> None:
    def fn(rank: int) -> None:
        make_engine(nn.Linear(4, 4, dtype=torch.complex64), COMPRESSORS["int8"](), 0)

    with pytest.raises(ConfigError, match="real gradients"):
        run_ranks(fn, 2)


def test_copies_of_the_state_and_kept_values_are_refused() -> None:
    def fn(rank: int) -> None:
        assert dist.group.WORLD is not None
        backend = get_backend("in_process")
        dp = backend.collectives(dist.group.WORLD)
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        groups = DataGroups(
            dp=dp,
            shard=backend.collectives(pairs[rank // 2]),
            replicate=backend.collectives(across[rank % 2]),
        )
        options = EngineOptions(stage=2, compression=COMPRESSORS["powersgd"]())
        DataParallelEngine(nn.Linear(4, 4), groups, options)

    with pytest.raises(ConfigError, match="PowerSGD keeps what it has not sent"):
        run_ranks(fn, 4)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("compression", ["int8", "powersgd"])
def test_no_half_is_recorded_where_a_backward_creates_a_graph(compression: str) -> None:
    """Autograd was on in the second half, which begins while backward runs."""

    def fn(rank: int) -> set[bool]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine, recorded = make_engine(model, COMPRESSORS[compression](), 1), set()
        for exchange in engine.exchanges:
            exchange.proceed = _noting(exchange.proceed, recorded)  # type: ignore[method-assign]
        with engine.step():
            loss = model(torch.ones(2, 8)).sum()
        with engine.backward():
            loss.backward(create_graph=True)
        return recorded

    assert run_ranks(fn, 2) == [{False}] * 2


def _noting(function: Callable[[], None], found: set[bool]) -> Callable[[], None]:
    def called() -> None:
        found.add(torch.is_grad_enabled())
        function()

    return called
