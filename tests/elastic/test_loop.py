"""An elastic run by itself: a real engine under a strategy that is made up, and no Trainer."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.data_parallel.memory.leftovers import take_leftovers
from lightning_shard.elastic import _lightning, recovery, snapshot_memory
from lightning_shard.elastic.data_assignment import BatchAssignment, DataAssignment
from lightning_shard.elastic.epoch_order import Position
from lightning_shard.elastic.hook_values import HookValues
from lightning_shard.elastic.loop import ElasticRun, Reconfiguration
from lightning_shard.elastic.membership.generation import Generation, Membership
from lightning_shard.elastic.membership.ranks import ElasticRanks
from lightning_shard.elastic.progress import WhatTrains
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.errors import CheckpointError, ConfigError, EvictedError, RankFailedError
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, assert_same, attach, start

MEMBERS = ("a", "b")


@dataclass
class FakeStrategy:
    """Makes engines over the ranks of a test, and writes down what it is asked."""

    stage: int
    calls: list[Any] = field(default_factory=list)
    root_device: torch.device = torch.device("cpu")  # noqa: RUF009

    def __post_init__(self) -> None:
        self.setting = Setting(stage=self.stage)
        self.rank = start(self.setting, seed=7)
        self.optimizers = [self.rank.optimizer]

    @property
    def engine(self) -> Any:
        return self.rank.engine

    @property
    def collectives(self) -> Any:
        return self.rank.collectives

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.collectives.broadcast_object(obj, src=src)

    def finish_save(self) -> None:
        self.calls.append("finish")

    def drop_generation(self) -> None:
        self.calls.append("drop")
        self.rank.sharded.detach()
        self.rank.engine.abandon()

    def join_generation(self, generation: Generation) -> None:
        self.calls.append(("join", generation.number))

    def rebuild_engine(self) -> None:
        self.calls.append("rebuild")
        model, optimizer = self.rank.model, self.rank.optimizer
        take_leftovers(model)
        optimizer.state.clear()
        self.rank = attach(self.setting, model, optimizer)

    def end_training(self) -> None:
        self.calls.append("end")


class FakeMembership(Membership):
    """The same members, generation after generation, unless there is a verdict."""

    def __init__(self, me: str, verdict: Exception | None = None) -> None:
        self.me, self.first_size = me, len(MEMBERS)
        self.verdict = verdict
        self.number = 1
        self.told: list[BaseException | None] = []
        self.wanted = self.leaving = self.has_left = False

    @property
    def is_wanted(self) -> bool:
        return self.wanted

    @property
    def is_leaving(self) -> bool:
        return self.leaving

    def begin(self) -> Generation:
        return self.generation()

    def following(self, error: BaseException | None = None) -> Generation:
        self.told.append(error)
        if self.verdict is not None:
            raise self.verdict
        self.number += 1
        return self.generation()

    def generation(self) -> Generation:
        return Generation(number=self.number, members=MEMBERS, me=self.me, reason="rank 2 died")

    def init_groups(self, *_: Any) -> None:
        """The test's ranks have theirs."""

    def drop_groups(self) -> None:
        """They keep them, too."""

    def leave(self) -> None:
        self.has_left = True


@dataclass(frozen=True)
class FakeProgress:
    """Knows the step alone."""

    step: int
    behind_step: bool
    accumulation: int = 1
    batch_assignment: str = "where training was"
    what_trains: WhatTrains = WhatTrains(as_built={}, now={}, groups=[])  # noqa: RUF009
    hook_values: None = None

    @classmethod
    def of(cls, trainer: Any, *_: Any, behind_step: bool) -> "FakeProgress":
        return cls(trainer.global_step, behind_step)

    def pack(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def unpack(packed: bytes) -> "FakeProgress":
        return pickle.loads(packed)

    def load_module(self, _: Any) -> None:
        """There are none."""

    def load_trainer(self, trainer: Any) -> None:
        trainer.global_step = self.step

    def load_own(self, *_: Any) -> None:
        """Nothing is logged."""


class Job:
    """One rank's run, and what it is made of."""

    def __init__(self, index: int, *, stage: int = 2, **membership: Any) -> None:
        self.strategy = FakeStrategy(stage)
        self.membership = FakeMembership(MEMBERS[index], **membership)
        self.ranks = ElasticRanks()
        nothing: Any = None
        self.ranks.begin(self.membership, nothing, nothing)
        self.saved: list[str] = []
        self.trainer: Any = SimpleNamespace(
            global_step=0,
            loggers=[],
            checkpoint_callbacks=[],
            is_global_zero=index == 0,
            lightning_module=self.strategy.rank.model,
            ckpt_path=None,
            default_root_dir="here",
            save_checkpoint=self.saved.append,
        )
        data_assignment = create_autospec(DataAssignment, instance=True)
        data_assignment.batch_assignment = BatchAssignment(
            global_batch=None, accumulation=1, num_ranks=2, position=Position(epoch=0)
        )
        fit = ElasticFit(
            strategy=self.strategy,
            trainer=self.trainer,
            ranks=self.ranks,
            data_assignment=data_assignment,
            hook_values=create_autospec(HookValues, instance=True),
            snapshot_every=2,
            max_failures=1,
            timeout=timedelta(seconds=10),
            buddy_stride=1,
        )
        self.run = ElasticRun(fit)
        self.run.begin_fit()
        self.run.begin()

    def train(self, num_steps: int) -> None:
        """Take optimizer steps, with the boundary behind each."""
        for _ in range(num_steps):
            step = self.trainer.global_step
            self.strategy.rank.train(step, step + 1)
            self.trainer.global_step = step + 1
            self.run.reach_boundary()


@pytest.fixture(autouse=True)
def no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is Lightning's, and what later Trainers would take over."""
    for module in (snapshot_memory, recovery):
        monkeypatch.setattr(module, "Progress", FakeProgress)
    monkeypatch.setattr(_lightning, "epoch_of_samplers", lambda _: 0)
    monkeypatch.setattr(_lightning, "begin_anew", lambda *_, **__: None)
    monkeypatch.setattr("lightning_shard.elastic.recovery.mark_terminated", lambda _: None)
    monkeypatch.setattr(ElasticRanks, "of_process", None)


def ranks(fn: Callable[[int], Any]) -> Sequence[Any]:
    return run_ranks(fn, len(MEMBERS))


@pytest.mark.parametrize(("stage", "expected"), [(0, 3), (2, 2)])
def test_a_run_goes_on_from_the_last_boundary_that_is_remembered(stage: int, expected: int) -> None:
    def fn(index: int) -> tuple[Any, ...]:
        job = Job(index, stage=stage)
        job.train(expected)
        before = job.strategy.rank.full()
        job.train(3 - expected)  # what only a replicated scheme has not to do again
        lost = RankFailedError("rank 2 died")
        assert job.run.survives(lost)
        job.run.reconfigure(lost)
        assert_same(job.strategy.rank.full(), before)
        job.train(1)
        return job.strategy.calls, job.membership.told, job.run.stands_behind_step

    calls = ["drop", ("join", 2), "rebuild"]
    assert ranks(fn) == [(calls, [None], True)] * 2


def test_a_newcomer_is_let_in_at_the_next_snapshot_and_no_earlier() -> None:
    def fn(index: int) -> int:
        job = Job(index)
        job.membership.wanted = index == 1
        job.train(1)
        with pytest.raises(Reconfiguration):
            job.train(1)
        return job.trainer.global_step

    assert ranks(fn) == [2, 2]


@pytest.mark.parametrize("leavers", [(1,), (0, 1)])
def test_who_is_asked_to_leave_leaves_at_a_boundary_and_all_save_together(
    leavers: tuple[int, ...],
) -> None:
    def fn(index: int) -> tuple[bool, list[str]]:
        job = Job(index)
        job.membership.leaving = index in leavers
        job.train(1)
        with pytest.raises(SIGTERMException if index in leavers else Reconfiguration):
            job.train(1)
        assert job.run.early_end.is_certain == (index in leavers)
        return job.membership.has_left, job.saved

    if len(leavers) == 1:
        assert ranks(fn) == [(False, []), (True, [])]
    else:
        assert ranks(fn) == [(False, ["here/elastic-step=2.ckpt"])] * 2


def test_an_error_of_ones_own_is_told_and_a_verdict_on_it_ends_the_fit() -> None:
    def fn(index: int) -> None:
        job = Job(index, verdict=EvictedError("failed too often"))
        mine = ValueError("a bad sample")
        with pytest.raises(ValueError, match="a bad sample") as caught:
            job.run.reconfigure(mine)
        assert caught.value.__notes__ == ["failed too often"]
        assert job.membership.told == [mine]
        assert not job.run.survives(RankFailedError("any other"))

    ranks(fn)


def test_the_same_ranks_do_not_reconfigure_for_ever_at_one_step() -> None:
    def fn(index: int) -> int:
        job = Job(index)
        for _ in range(2):
            job.run.reconfigure(RankFailedError("a false alarm"))
        with pytest.raises(RankFailedError, match="a false alarm") as caught:
            job.run.reconfigure(RankFailedError("a false alarm"))
        assert "reconfigured 2 times at step 0" in caught.value.__notes__[0]
        assert not job.run.survives(caught.value)
        return job.strategy.calls.count("rebuild")

    assert ranks(fn) == [2, 2]


def test_a_run_without_a_complete_boundary_or_a_checkpoint_ends() -> None:
    def fn(index: int) -> None:
        job = Job(index)
        job.run.end_fit()  # forgets what it remembered
        with pytest.raises(CheckpointError, match="rank 2 died, and with them all copies"):
            job.run.reconfigure(RankFailedError("rank 2 died"))
        assert not job.run.survives(RankFailedError("any other"))

    ranks(fn)


def test_mistakes_and_interrupts_are_not_survived() -> None:
    def fn(index: int) -> list[bool]:
        run = Job(index).run
        errors = (ConfigError("an option"), KeyboardInterrupt(), Reconfiguration(), OSError())
        return [run.survives(error) for error in errors]

    assert ranks(fn) == [[False, False, True, True]] * 2
