"""From the snapshots of some ranks to the state of others."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.leftovers import take_leftovers
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.elastic.recovery import agree, restore
from lightning_shard.errors import CheckpointError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, assert_same, attach, load, run_to, start, survivors
from tests.groups import all_ranks, engine_of

pytestmark = pytest.mark.each_value

Full = tuple[dict[str, Tensor], dict[str, Any]]


def recovered(
    setting: Setting, holdings: Sequence[list[Snapshot]], num_more_steps: int
) -> tuple[Full, list[tuple[bytes, bytes | None]]]:
    """Restore on fresh ranks and train on; return the full state and what was put beside it."""

    def fn(index: int) -> tuple[Full, tuple[bytes, bytes | None]]:
        rank = start(setting, seed=index)  # of other values than before
        rank.train(0, 1)
        held = holdings[index]
        plan = agree(rank.collectives, held)
        assert plan is not None
        own = next((one.metadata.owner for one in held), "a newcomer")
        extras = restore(rank.collectives, plan, held, rank.engine, [rank.optimizer], me=own)
        rank.train(plan.step, plan.step + num_more_steps)
        return rank.full(), extras

    results = [result for result in run_ranks(fn, len(holdings)) if result is not None]
    return results[0][0], [tuple(extras) for _, extras in results]


def undisturbed(setting: Setting, full: Full, size: int, first: int, last: int) -> Full:
    def fn(index: int) -> Full:
        rank = load(setting, full)
        rank.train(first, last)
        return rank.full()

    result = run_ranks(fn, size)[0]
    assert result is not None
    return result


CHANGES = {
    "4 to 3": (4, [2], 0),
    "3 to 4": (3, [], 1),
    "1 to 4": (1, [], 3),
    "2 to 5": (2, [], 3),
    "two that are no neighbours": (4, [1, 3], 0),
    "one lost, two new": (3, [0], 2),
}
LOWER = {
    "fp32": {},
    "bf16-mixed": {"compute": torch.bfloat16},
    "bf16-true": {"params": torch.bfloat16},
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", range(4))
def test_training_goes_on_as_from_a_full_checkpoint(change: str, stage: int) -> None:
    check(Setting(stage=stage), *CHANGES[change])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", range(4))
def test_masters_keep_their_digits(precision: str, stage: int) -> None:
    check(Setting(stage=stage, **LOWER[precision]), 4, [1], 0)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("optimizer", ["SGD", "NAdam", "fused AdamW"])
@pytest.mark.parametrize("stage", [0, 3])
def test_other_optimizers(optimizer: str, stage: int) -> None:
    check(Setting(stage=stage, optimizer=optimizer), 3, [1], 0)


def test_state_that_is_not_per_element() -> None:
    check(Setting(stage=0, optimizer="Adafactor"), 3, [1], 1)


def check(setting: Setting, size: int, lost: list[int], num_new: int) -> None:
    held, full = run_to(setting, size, 3)
    holdings = survivors(held, lost, num_new)
    got, extras = recovered(setting, holdings, 2)
    assert_same(got, undisturbed(setting, full, len(holdings), 3, 5))
    speaks = 0 if setting.stage or 0 not in lost else min(set(range(size)) - set(lost))
    remaining = [rank for rank in range(size) if rank not in lost]
    own = [f"rank {rank} at 3".encode() for rank in remaining] + [None] * num_new
    assert extras == [(f"rank {speaks} at 3".encode(), one) for one in own]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_survivors_keep_model_and_optimizer(stage: int) -> None:
    setting = Setting(stage=stage)
    held, full = run_to(setting, 3, 3)
    remains: dict[int, tuple[nn.Module, Any]] = {}

    def before(index: int) -> None:
        rank = start(setting)
        rank.train(0, 4)  # a step too far
        rank.sharded.detach()
        rank.engine.abandon()
        remains[index] = rank.model, rank.optimizer

    def after(index: int) -> Full:
        model, optimizer = remains[index + 1]
        take_leftovers(model)
        rank = attach(setting, model, optimizer)
        plan = agree(rank.collectives, holdings[index])
        assert plan is not None
        restore(rank.collectives, plan, holdings[index], rank.engine, [rank.optimizer])
        rank.train(3, 5)
        return rank.full()

    run_ranks(before, 3)
    holdings = survivors(held, [0], 0)
    got = run_ranks(after, 2)[0]
    assert_same(got, undisturbed(setting, full, 2, 3, 5))


def test_the_live_state_of_a_replicated_rank_is_newest() -> None:
    setting = Setting(stage=0)

    def fn(index: int) -> tuple[int, Full]:
        rank = start(setting)
        rank.train(0, 2)
        held = [] if index == 2 else [rank.snapshot(2)]
        if index == 2:
            rank.optimizer.state.clear()
        plan = agree(rank.collectives, held)
        assert plan is not None
        restore(rank.collectives, plan, held, rank.engine, [rank.optimizer])
        rank.train(2, 4)
        return plan.step, rank.full()

    def straight(index: int) -> Full:
        rank = start(setting)
        rank.train(0, 4)
        return rank.full()

    results = run_ranks(fn, 3)
    assert results[0] is not None
    assert results[0][0] == 2
    assert_same(results[0][1], run_ranks(straight, 3)[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_optimizers(stage: int) -> None:
    def make() -> tuple[nn.Module, list[optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
        return model, [
            optim.Adam(model[0].parameters(), lr=0.1),
            optim.SGD(model[2].parameters(), lr=torch.tensor(0.1), momentum=0.9),
        ]

    def train(
        model: nn.Module, optimizers: list[optim.Optimizer], engine: DataParallelEngine
    ) -> None:
        with engine.step():
            loss = model(torch.ones(2, 3)).square().mean()
        with engine.backward():
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def build() -> tuple[nn.Module, list[optim.Optimizer], DataParallelEngine]:
        model, optimizers = make()
        engine = engine_of(model, stage=stage)
        for optimizer in optimizers:
            ShardedOptimizer(optimizer, engine)
        return model, optimizers, engine

    def first(_: int) -> tuple[Snapshot, dict[str, Tensor]]:
        model, optimizers, engine = build()
        train(model, optimizers, engine)
        optimizers[1].param_groups[0]["lr"].fill_(0.05)
        snapshot = take(engine, optimizers, step=1)
        train(model, optimizers, engine)
        engine.detach(restore=True)
        return snapshot, model.state_dict()

    def second(rank: int) -> dict[str, Tensor]:
        model, optimizers, engine = build()
        rate = optimizers[1].param_groups[0]["lr"]
        held = [taken[rank][0]] if rank < 2 else []
        plan = agree(engine.collectives, held)
        assert plan is not None
        restore(engine.collectives, plan, held, engine, optimizers)
        assert optimizers[1].param_groups[0]["lr"] is rate  # a scheduler may hold it
        train(model, optimizers, engine)
        engine.detach(restore=True)
        return dict(model.state_dict())

    taken = [one for one in run_ranks(first, 2) if one is not None]
    for got in run_ranks(second, 3):
        torch.testing.assert_close(got, dict(taken[0][1]))


def test_a_snapshot_of_another_model() -> None:
    held, _ = run_to(Setting(stage=1), 2, 1)

    def fn(rank: int) -> None:
        collectives = all_ranks()
        model = nn.Linear(2, 2)
        engine = DataParallelEngine(model, collectives, EngineOptions(stage=1))
        plan = agree(collectives, held[rank])
        assert plan is not None
        restore(collectives, plan, held[rank], engine, [optim.AdamW(model.parameters())])

    with pytest.raises(CheckpointError, match=r"step 1 is of a model .* this one has \(6,\)"):
        run_ranks(fn, 2)


def test_a_newcomer_with_fewer_groups() -> None:
    held, _ = run_to(Setting(stage=1), 2, 1)

    def fn(index: int) -> None:
        rank = start(Setting(stage=1))
        extra = nn.Parameter(torch.ones(1))
        rank.optimizer.add_param_group({"params": [extra]})
        plan = agree(rank.collectives, held[index])
        assert plan is not None
        restore(rank.collectives, plan, held[index], rank.engine, [rank.optimizer])

    with pytest.raises(CheckpointError, match=r"in \[1\] groups, got groups of"):
        run_ranks(fn, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_of_several_formats(stage: int) -> None:
    class Mixed(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.single = nn.Parameter(torch.randn(5, 3))
            self.doubled = nn.Parameter(torch.randn(7, dtype=torch.float64))
            self.waves = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.codes = nn.Parameter(torch.randint(9, (6,)), requires_grad=False)

    def build(seed: int) -> tuple[Mixed, optim.Optimizer, DataParallelEngine]:
        model = Mixed(seed)
        optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], momentum=0.9)
        engine = engine_of(model, stage=stage)
        ShardedOptimizer(optimizer, engine)
        with engine.step():
            pass
        return model, optimizer, engine

    def first(_: int) -> tuple[Snapshot, dict[str, Tensor]]:
        model, optimizer, engine = build(1)
        snapshot = take(engine, [optimizer], step=1)
        engine.detach(restore=True)
        return snapshot, dict(model.state_dict())

    def second(rank: int) -> dict[str, Tensor]:
        model, optimizer, engine = build(2)
        held = [taken[rank][0]] if rank < 2 else []
        plan = agree(engine.collectives, held)
        assert plan is not None
        restore(engine.collectives, plan, held, engine, [optimizer])
        engine.detach(restore=True)
        return dict(model.state_dict())

    taken = [one for one in run_ranks(first, 2) if one is not None]
    for got in run_ranks(second, 5):
        assert_same(got, taken[0][1])
