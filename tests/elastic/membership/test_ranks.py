"""Ranks of one process that come and go: each fault, without Lightning."""

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.in_process.faults import FaultKind
from lightning_shard.backends.in_process.world import ElasticWorld, current_rank
from lightning_shard.elastic.membership.generation import Generation, GroupSetup
from lightning_shard.elastic.membership.membership_table import Bounds
from lightning_shard.elastic.membership.ranks import InProcessMembership
from lightning_shard.errors import (
    ConfigError,
    DeadlockError,
    EvictedError,
    JobOverError,
    RankFailedError,
)
from lightning_shard.testing import Fault, run_ranks

Step = Callable[[int], None]
NUM_STEPS = 12


def all_reduce(step: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


class Job:
    """Ranks that take steps, agree on how far they are, and survive each other's loss.

    Args:
        rolls_back: Do all steps of a generation again when it has lost a rank.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        num_ranks: int = 4,
        step: Step = all_reduce,
        rolls_back: bool = False,
        **bounds: Any,
    ) -> None:
        self.world = ElasticWorld(num_ranks, faults)
        self.take_step, self.bounds, self.rolls_back = step, bounds, rolls_back
        self.steps_of: dict[int, list[int]] = {}  # by thread, those that it has done
        self.events: list[tuple[int, str]] = []  # (thread, what)
        self.sizes: list[tuple[int, ...]] = []  # threads of each generation

    def run(self) -> "Job":
        self.results = self.world.run(self._train)
        return self

    def note(self, event: str) -> None:
        self.events.append((self.world.thread, event))

    def _train(self, thread: int) -> int:
        membership = InProcessMembership(Bounds(**self.bounds))
        generation = membership.begin()
        steps = self.steps_of.setdefault(thread, [])
        if generation is None:
            self._set_up_alone(membership)
            generation = membership.following()
        while True:
            error: BaseException | None = None
            step = steps[-1] + 1 if steps else 0
            if self.rolls_back:
                step = 0
            try:
                step = self._reconfigure(membership, generation, step)
                step = self._take_steps(membership, generation, step)
                if generation.is_last or step == NUM_STEPS or membership.is_leaving:
                    membership.leave()
                    return step
            except RankFailedError as lost:
                self.note(f"lost: {str(lost).partition(': ')[2][:40]}")
            except ValueError as own:
                error = own
            membership.drop_groups()
            generation = membership.following(error)

    def _set_up_alone(self, membership: InProcessMembership) -> None:
        alone = Generation(number=0, members=(membership.me,), me=membership.me)
        membership.init_groups(
            alone, GroupSetup(InProcessBackend(), torch.device("cpu"), timedelta(seconds=10))
        )
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert current_rank() == self.world.thread  # it is no rank 0, and writes no files
        all_reduce(0)
        membership.drop_groups()

    def _reconfigure(
        self, membership: InProcessMembership, generation: Generation, step: int
    ) -> int:
        setup = GroupSetup(InProcessBackend(), torch.device("cpu"), timedelta(seconds=10))
        membership.init_groups(generation, setup)
        assert (dist.get_rank(), dist.get_world_size()) == (generation.rank, generation.size)
        self.note(f"generation {generation.number}: rank {generation.rank} of {generation.size}")
        if generation.rank == 0:
            self.sizes.append(tuple(int(m.removeprefix("thread")) for m in generation.members))
        steps = torch.tensor([step])
        dist.all_reduce(steps, dist.ReduceOp.MAX)  # newcomers are told where the others are
        return int(steps)

    def _take_steps(
        self, membership: InProcessMembership, generation: Generation, step: int
    ) -> int:
        while step < NUM_STEPS and not generation.is_last:
            membership.begin_step(step)
            self.take_step(step)
            self.steps_of[self.world.thread].append(step)
            step += 1
            flags = torch.tensor([membership.is_wanted, membership.is_leaving], dtype=torch.int)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            if flags.any():
                break
        return step


def test_nothing_happens() -> None:
    job = Job([]).run()
    assert job.results == [NUM_STEPS] * 4
    assert job.sizes == [(0, 1, 2, 3)]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("at_collective", [1, 2])
def test_a_dropped_rank_is_done_without(rank: int, at_collective: int) -> None:
    job = Job([Fault(rank, at_collective, "drop", at_step=5)]).run()
    survivors = tuple(r for r in range(4) if r != rank)
    assert job.results == [None if r == rank else NUM_STEPS for r in range(4)]
    assert job.sizes == [(0, 1, 2, 3), survivors]
    assert job.world.survivors() == list(survivors)
    assert job.world.faults.struck == [Fault(rank, at_collective, "drop", at_step=5)]


def test_two_dropped_at_once() -> None:
    job = Job([Fault(r, 1, "drop", at_step=5) for r in (0, 2)]).run()
    assert job.results == [None, NUM_STEPS, None, NUM_STEPS]
    assert job.sizes[-1] == (1, 3)


def test_all_but_one_dropped() -> None:
    job = Job([Fault(r, 1, "drop", at_step=5) for r in (0, 1, 3)]).run()
    assert job.results == [None, None, NUM_STEPS, None]
    assert job.sizes[-1] == (2,)


def test_a_second_loss_while_the_others_reconfigure() -> None:
    # The second operation from there is the first of generation 2: the all-reduce has failed.
    job = Job([Fault(2, 1, "drop", at_step=5), Fault(1, 2, "drop", at_step=5)]).run()
    assert job.results == [NUM_STEPS, None, None, NUM_STEPS]
    assert job.sizes == [(0, 1, 2, 3), (0, 1, 3), (0, 3)]


def test_a_fault_strikes_once_though_its_step_is_done_again() -> None:
    faults = [Fault(2, 1, "drop", at_step=5), Fault(4, 1, "add", at_step=4)]
    job = Job(faults, rolls_back=True).run()
    assert job.results == [NUM_STEPS, NUM_STEPS, None, NUM_STEPS, NUM_STEPS]
    assert job.world.faults.struck == faults[::-1]
    assert job.steps_of[0].count(3) == 3


def test_operations_are_counted_anew_from_a_step_that_is_done_again() -> None:
    # Each step has two: from step 5 the thirteenth is the first of step 11.
    faults = [Fault(2, 1, "drop", at_step=5), Fault(1, 13, "drop", at_step=5)]
    job = Job(faults, rolls_back=True).run()
    assert job.sizes == [(0, 1, 2, 3), (0, 1, 3), (0, 3)]
    assert job.steps_of[1] == [*range(5), *range(11)]


def barrier(step: int) -> None:
    dist.barrier()


def all_to_all(step: int) -> None:
    size = dist.get_world_size()
    received = torch.zeros(size)
    dist.all_to_all_single(received, torch.full((size,), float(dist.get_rank())))
    assert received.tolist() == list(range(size))


def ring(step: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(1)
    sending = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    assert received.item() == (rank - 1) % size


def from_anybody(step: int) -> None:
    if dist.get_rank() > 0:
        dist.send(torch.ones(1), 0)
        return
    for _ in range(dist.get_world_size() - 1):
        dist.recv(torch.zeros(1))


def pairs(step: int) -> None:
    """Make groups of two, so that some ranks share nothing with the one that is lost."""
    size = dist.get_world_size()
    groups = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    mine = dist.get_rank() // 2
    if mine < len(groups):
        dist.all_reduce(torch.ones(1), group=groups[mine])


@pytest.mark.parametrize("step", [barrier, all_to_all, ring, from_anybody, pairs])
@pytest.mark.parametrize("rank", range(4))
def test_dropped_in(step: Step, rank: int) -> None:
    job = Job([Fault(rank, 1, "drop", at_step=3)], step=step).run()
    assert job.results == [None if r == rank else NUM_STEPS for r in range(4)]
    assert len(job.sizes) == 2


def test_two_are_added() -> None:
    job = Job([Fault(4, 1, "add", at_step=3), Fault(5, 1, "add", at_step=7)]).run()
    assert job.results == [NUM_STEPS] * 6
    assert job.sizes == [(0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)]


def test_two_are_added_at_once() -> None:
    job = Job([Fault(4, 1, "add", at_step=3), Fault(5, 1, "add", at_step=3)]).run()
    assert job.results == [NUM_STEPS] * 6
    assert job.sizes == [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]


def test_one_is_added_after_another_was_dropped() -> None:
    faults = [
        Fault(0, 1, "drop", at_step=2),
        Fault(4, 1, "add", at_step=4),
        Fault(2, 1, "drop", at_step=6),
        Fault(5, 1, "add", at_step=8),
        Fault(4, 1, "drop", at_step=10),
    ]
    job = Job(faults).run()
    assert job.results == [None, NUM_STEPS, None, NUM_STEPS, None, NUM_STEPS]
    assert job.sizes == [(0, 1, 2, 3), (1, 2, 3), (1, 2, 3, 4), (1, 3, 4), (1, 3, 4, 5), (1, 3, 5)]
    assert [fault.at_step for fault in job.world.faults.struck] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_leaves_in_order(rank: int) -> None:
    job = Job([Fault(rank, 1, "leave", at_step=5)]).run()
    assert job.results == [6 if r == rank else NUM_STEPS for r in range(4)]
    assert job.sizes[-1] == tuple(r for r in range(4) if r != rank)
    assert job.world.survivors() == list(job.sizes[-1])
    assert not [event for _, event in job.events if event.startswith("lost")]


def test_above_max_ranks_one_waits_until_there_is_room() -> None:
    faults = [Fault(4, 1, "add", at_step=2), Fault(1, 1, "drop", at_step=8)]
    job = Job(faults, max_ranks=4).run()
    assert job.results == [NUM_STEPS, None, NUM_STEPS, NUM_STEPS, NUM_STEPS]
    assert job.sizes == [(0, 1, 2, 3), (0, 2, 3, 4)]


def test_one_that_waits_to_the_end_is_told() -> None:
    job = Job([Fault(4, 1, "add", at_step=2)], max_ranks=4).run()
    assert job.results == [NUM_STEPS] * 4 + [None]
    assert isinstance(job.world.scheduler.failures[4], JobOverError)


def test_below_min_ranks_the_last_generation_ends(caplog: pytest.LogCaptureFixture) -> None:
    faults = [Fault(1, 1, "drop", at_step=5), Fault(2, 1, "drop", at_step=5)]
    job = Job(faults, min_ranks=3).run()
    assert job.results == [5, None, None, 5]
    assert job.sizes == [(0, 1, 2, 3), (0, 3)]
    assert "waits for 1 more rank" in caplog.text


def test_below_min_ranks_they_wait_for_one_that_comes() -> None:
    faults = [Fault(4, 1, "add", at_step=5), Fault(1, 1, "drop", at_step=5)]
    job = Job(faults, min_ranks=4).run()
    assert job.results == [NUM_STEPS, None, *[NUM_STEPS] * 3]
    assert job.sizes == [(0, 1, 2, 3), (0, 2, 3, 4)]


def test_the_same_order_on_every_run() -> None:
    faults = [
        Fault(0, 2, "drop", at_step=2),
        Fault(4, 1, "add", at_step=2),
        Fault(3, 1, "leave", at_step=5),
        Fault(5, 1, "add", at_step=6),
    ]
    first, second = Job(faults).run(), Job(faults).run()
    assert first.events == second.events
    assert first.sizes == second.sizes


def test_a_deadlock_is_an_error_on_all() -> None:
    seen: list[int] = []

    def step(number: int) -> None:
        if dist.get_rank() < 2:  # each waits for the other's answer
            try:
                dist.recv(torch.zeros(1), 1 - dist.get_rank())
            except DeadlockError:
                seen.append(dist.get_rank())
                raise
        dist.barrier()

    with pytest.raises(DeadlockError, match="waits for ever"):
        Job([], step=step).run()
    assert seen == [0, 1]


def test_a_rank_that_fails_too_often_is_evicted() -> None:
    def step(number: int) -> None:
        if current_thread_is(job, 2):
            raise ValueError("a broken host")
        all_reduce(number)

    job = Job([], step=step, max_failures=2)
    job.run()
    assert job.results == [NUM_STEPS, NUM_STEPS, None, NUM_STEPS]
    error = job.world.scheduler.failures[2]
    assert isinstance(error, EvictedError)
    assert "a broken host" in str(error)
    assert job.sizes == [(0, 1, 2, 3)] * 3 + [(0, 1, 3)]


def current_thread_is(job: Job, thread: int) -> bool:
    return job.world.thread == thread


def test_all_that_fail_at_once_raise_the_first_error() -> None:
    def step(number: int) -> None:
        raise ValueError("a bug of the user's")

    with pytest.raises(EvictedError, match="a bug of the user's"):
        Job([], step=step).run()


def test_a_rank_that_raises_is_done_without() -> None:
    def step(number: int) -> None:
        if number == 4 and current_thread_is(job, 1):
            raise KeyError("not caught")
        all_reduce(number)

    job = Job([], step=step)
    job.run()
    assert job.results == [NUM_STEPS, None, NUM_STEPS, NUM_STEPS]
    assert job.sizes == [(0, 1, 2, 3), (0, 2, 3)]


def test_a_late_call_into_dropped_groups_is_refused() -> None:
    refused: list[str] = []

    def step(number: int) -> None:
        group = dist.group.WORLD
        try:
            all_reduce(number)
        except RankFailedError:
            job.world.drop_groups()
            with pytest.raises(ConfigError, match="has left") as caught:
                group.barrier()  # type: ignore[union-attr]
            refused.append(str(caught.value))
            raise

    job = Job([Fault(3, 1, "drop", at_step=1)], step=step)
    job.run()
    assert len(refused) == 3


def test_what_a_rank_had_begun_in_dropped_groups_is_taken_back() -> None:
    """A reduction that nobody has met must not write into tensors that were given other uses."""
    kept: dict[int, torch.Tensor] = {}

    def step(number: int) -> None:
        thread = job.world.thread
        if number != 1 or dist.get_world_size() < 3:
            return
        if thread == 0:
            kept[0] = torch.ones(1)
            dist.all_reduce(kept[0], group=dist.new_group([0, 1]), async_op=True)
            dist.recv(torch.zeros(1), 2)
        if thread == 2:
            dist.new_group([0, 1])
            dist.send(torch.zeros(1), 0)
        if thread == 1:
            group = dist.new_group([0, 1])
            while job.world.scheduler.ranks[0].left < 1:
                job.world.scheduler.yield_token(lambda: "a slow rank")
            dist.all_reduce(torch.ones(1), group=group)

    job = Job([Fault(2, 1, "drop", at_step=1)], num_ranks=3, step=step)
    job.run()
    assert job.results == [NUM_STEPS, NUM_STEPS, None]
    assert (1, "lost: rank 0 has left these groups. Go on in t") in job.events
    assert kept[0].item() == 1.0


def some_faults(chance: random.Random, num_ranks: int) -> list[Fault]:
    """Return up to eight, of which rank 0 has none."""
    faults, num_threads = list[Fault](), num_ranks
    for step in sorted(chance.choices(range(NUM_STEPS), k=8)):
        kind = chance.choice(["add", "drop", "leave", "fail"])
        if kind == "add":
            faults.append(Fault(num_threads, 1, "add", at_step=step))
            num_threads += 1
        else:
            rank, at_collective = chance.randrange(1, num_threads), chance.randint(1, 4)
            faults.append(Fault(rank, at_collective, cast(FaultKind, kind), at_step=step))
    return faults


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_one_that_is_spared_gets_to_the_end(seed: int) -> None:
    chance = random.Random(seed)
    job = Job(
        some_faults(chance, num_ranks=3),
        num_ranks=3,
        step=chance.choice([all_reduce, barrier, all_to_all, ring, from_anybody, pairs]),
        rolls_back=chance.random() < 0.5,
        max_ranks=chance.choice([None, 3, 4]),
    ).run()
    survivors = job.world.survivors()
    assert survivors[0] == 0
    assert all(job.results[thread] == NUM_STEPS for thread in survivors)
    assert all(size[0] == 0 for size in job.sizes)


def test_outside_an_elastic_world() -> None:
    with pytest.raises(ConfigError, match="elastic in-process world"):
        InProcessMembership(Bounds())

    def fn(rank: int) -> None:
        with pytest.raises(ConfigError, match="whose ranks stay"):
            InProcessMembership(Bounds())

    run_ranks(fn, 2)
