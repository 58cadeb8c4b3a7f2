"""Python that a step runs on the host, counted: what a parameter and a unit may cost.

The counts are the same in every run; `python -m tests.benchmarks.host_overhead` has them over Gloo,
with the times. One that has grown is work done parameter by parameter that can be done for all of a
buffer at once, or once for all steps.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.optim import Optimizer

from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.benchmarks.host_overhead import (
    NUM_WARMUP_STEPS,
    UNIT_BY_UNIT,
    IdleModel,
    Size,
    count_calls,
    idle_batch,
)
from tests.groups import engine_of

# one step more of each parameter, beside training without an engine
PER_PARAM = {0: 4, 1: 3, 2: 3, 3: 5}
# one step more of each unit of 8 parameters, those and an in-process collective's Python included
PER_UNIT = {0: 350, 1: 540, 2: 570, 3: 1000}


def calls_without_engine(size: Size) -> int:
    model = IdleModel(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss = model(*idle_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _count(step)


def calls_of_rank_0(stage: int, sizes: Sequence[Size]) -> list[int]:
    """Count the calls of a step of models of several sizes, beside those without an engine."""

    def fn(rank: int) -> list[int]:
        return [_calls_of_engine(stage, size) for size in sizes]

    counted = run_ranks(fn, 2)[0]
    assert counted is not None
    return [calls - calls_without_engine(size) for calls, size in zip(counted, sizes, strict=True)]


def _calls_of_engine(stage: int, size: Size) -> int:
    model = IdleModel(size)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, stage=stage, bucket_mb=UNIT_BY_UNIT)
    sharded = ShardedOptimizer(optimizer, engine)

    def step() -> None:
        with engine.step():
            loss = model(*idle_batch())
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
        optimizer.step()

    calls = _count(step)
    sharded.detach()
    return calls


def _count(step: Callable[[], None]) -> int:
    for _ in range(NUM_WARMUP_STEPS):
        step()
    return int(count_calls(step).calls)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("stage", range(4))
def test_what_a_parameter_costs_is_bounded_and_does_not_grow_with_their_number(stage: int) -> None:
    few, more, many = calls_of_rank_0(stage, [Size(2, 10), Size(2, 50), Size(2, 210)])
    assert (more - few) / 80 <= PER_PARAM[stage]
    assert (many - more) / 320 <= PER_PARAM[stage]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_what_a_unit_costs_is_bounded_and_does_not_grow_with_their_number(stage: int) -> None:
    few, more, many = calls_of_rank_0(stage, [Size(4, 8), Size(8, 8), Size(24, 8)])
    assert (more - few) / 4 <= PER_UNIT[stage]
    assert (many - more) / 16 <= PER_UNIT[stage]
