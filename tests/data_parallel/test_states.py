"""The state words of the engine's objects: their tables, and plain runs that go their ways."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_shard.core.states import State
from lightning_shard.data_parallel.async_sgd.async_sgd import WorkerStep
from lightning_shard.data_parallel.buffers import Differ, Updated
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.flat_gradients import InBackward
from lightning_shard.data_parallel.gradients.reducer import Owed
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.units.unit import Digits, UnitState
from lightning_shard.data_parallel.units.unsharding import Since
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

# what an object is made in
FIRST = [UnitState.FULL, Digits.ROUNDED, InBackward.ARRIVING, Owed.NOTHING, Since.START]
FIRST += [Phase.REST, Differ.NOT, Updated.UNKNOWN, WorkerStep.COUNTED]
Ways = dict[str, set[str]]


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_each_state_can_be_reached(first: State) -> None:
    states = type(first)
    found, new = {first.name}, {first.name}
    while new:
        new = {after for one in new for after in states[one].then} - found
        found |= new
    assert found == set(states.__members__)


@pytest.mark.parametrize("first", FIRST, ids=str)
def test_what_a_table_does_not_allow_raises(first: State) -> None:
    for before in type(first):
        for after in (one for one in type(first) if one.name not in before.then):
            with pytest.raises(AssertionError, match="was changed to"):
                before.to(after)


@contextmanager
def noted() -> Iterator[Ways]:
    """Note the changes of each word inside, each as the two states' names."""
    ways, to = defaultdict[str, set[str]](set), State.to

    def noting(before: State, after: State) -> State:
        ways[type(after).__name__].add(f"{before.name} {after.name}")
        return to(before, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(State, "to", noting)
        yield ways


def trained(stage: int) -> Ways:
    """Accumulate, train with a hook before the update, and evaluate, on two ranks."""

    def fn(rank: int) -> None:
        ranks = all_ranks()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        options = EngineOptions(stage=stage, bucket_mb=1e-6)
        engine = DataParallelEngine(model, ranks, options)
        sharded = ShardedOptimizer(torch.optim.SGD(model.parameters(), 0.1), engine)
        for is_last in (False, True):
            with engine.step():
                loss = model(torch.randn(2, 4)).sum()
            with engine.no_sync() if not is_last else engine.hook(), engine.backward():
                loss.backward()
        engine.average_gradients()
        with engine.hook():
            sharded.optimizer.step()
        with torch.no_grad(), engine.step():
            model(torch.randn(2, 4))
        sharded.detach()
        engine.detach(restore=True)

    with noted() as ways:
        run_ranks(fn, 2)
    return ways


@pytest.mark.parametrize("stage", range(4))
def test_a_run_goes_the_way_that_the_tables_show(stage: int) -> None:
    ways = trained(stage)
    assert ways["Phase"] == {
        *("REST STEP", "REST BACKWARD", "REST HOOK", "HOOK BACKWARD", "HOOK UPDATE"),
        "REST OVER",
    }
    assert ways["Owed"] == {
        *("NOTHING ARRIVING", "ARRIVING SUMS", "SUMS SUMS", "SUMS ARRIVING_TO_SUMS"),
        *("ARRIVING_TO_SUMS NOTHING", "NOTHING NOTHING"),
    }
    never_sent = set() if stage > 1 else {"ARRIVING LEFT", "LEFT ARRIVING"}  # of a sum only
    assert ways["InBackward"] == {"ARRIVING SENT", "SENT DONE", "DONE ARRIVING", *never_sent}
    unshards = {"FULL SHARDED", "SHARDED UNSHARDING", "UNSHARDING FULL"}
    assert ways["UnitState"] == (unshards if stage == 3 else set())
    assert ways["Since"] == ({"START FIRST_STEP"} if stage == 3 else set())
    assert ways["Differ"] == {"NOT DUE", "DUE MAYBE", "MAYBE DUE", "MAYBE NOT"}
    assert ways["Updated"] == {"UNKNOWN AWAITED", "AWAITED DONE", "DONE AWAITED"}


def test_a_phase_ends_also_where_an_error_has_ended_one_around_it() -> None:
    phases = Phases()
    phases.begin(Phase.STEP)
    phases.begin(Phase.UPDATE)
    phases.end(Phase.STEP)
    assert phases.open == (Phase.UPDATE,)
    assert phases.now is Phase.UPDATE
    phases.end(Phase.UPDATE)
    assert phases.now is Phase.REST
    with pytest.raises(AssertionError, match="UPDATE has not begun"):
        phases.end(Phase.UPDATE)
