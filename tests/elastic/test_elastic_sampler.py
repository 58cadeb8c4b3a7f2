"""Ranks come and go at steps: every sample of an epoch once, and the loop sees one epoch."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lightning_shard.elastic.elastic_sampler import ElasticBatchSampler, install
from lightning_shard.elastic.epoch_order import EpochOrder, Position
from lightning_shard.elastic.shares import num_parts
from lightning_shard.errors import ConfigError, LayoutError

changes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6
)  # so many ranks for so many steps
sizes = st.integers(1, 30)


def make(num_samples: int, rank: int, num_ranks: int, **options: Any) -> ElasticBatchSampler:
    order = EpochOrder(RandomSampler(range(num_samples)), seed=1)
    return ElasticBatchSampler(order, rank=rank, num_ranks=num_ranks, **options)


def resume(sampler: ElasticBatchSampler, epoch: int, samples: int) -> None:
    """Take an epoch up after whole steps."""
    steps = num_parts(samples, sampler.global_batch)
    sampler.sampler.take_up(Position(epoch=epoch, samples=samples, steps=steps))


def steps_of_all(
    samplers: list[ElasticBatchSampler], num_steps: int | None = None
) -> Iterator[list[int]]:
    """The samples that count of each step, over all ranks."""
    shares = samplers[0].shares
    iterators = [iter(sampler) for sampler in samplers]
    for step in itertools.islice(shares.steps, num_steps):
        counted: list[int] = []
        for microbatch in range(shares.step(step).num_microbatches):
            batches = [next(iterator) for iterator in iterators]
            for rank, batch in enumerate(batches):
                assert 1 <= len(batch) <= samplers[rank].rank_batch
                if samplers[rank].weight(step, microbatch) > 0:
                    counted += batch
        yield counted
    if num_steps is None:
        assert [next(iterator, None) for iterator in iterators] == [None] * len(samplers)


def disturbed(
    num_samples: int, epoch: int, plan: list[tuple[int, int]], **options: Any
) -> list[list[int]]:
    """The steps of an epoch in which ranks come and go; survivors and newcomers are mixed."""
    steps: list[list[int]] = []
    position = Position(epoch=epoch)
    samplers: list[ElasticBatchSampler] = []
    for num_ranks, num_steps in [*plan, (plan[0][0], None)]:
        newcomers = range(len(samplers), num_ranks)
        samplers += [make(num_samples, rank, num_ranks, **options) for rank in newcomers]
        samplers = samplers[-num_ranks:]  # the lowest ranks are lost
        for rank, sampler in enumerate(samplers):
            sampler.rescale(rank, num_ranks)
            sampler.sampler.take_up(position)
            sampler.set_epoch(epoch)  # as the loop does
        lengths = {len(sampler) for sampler in samplers}
        assert len(lengths) == 1
        begun = samplers[0].sampler.start.steps * samplers[0].accumulation
        assert lengths.pop() - begun == len(list(samplers[0]))
        steps += steps_of_all(samplers, num_steps)
        position = samplers[0].position(len(steps))
    return steps


@given(sizes, st.integers(1, 12), st.integers(1, 4), st.integers(0, 2), changes)
def test_changes_leave_the_steps_as_they_were(
    num_samples: int, global_batch: int, rank_batch: int, epoch: int, plan: list[tuple[int, int]]
) -> None:
    options = {"global_batch": global_batch, "rank_batch": rank_batch}
    steps = disturbed(num_samples, epoch, plan, **options)
    undisturbed = disturbed(num_samples, epoch, [(1, 0)], **options)
    assert [sorted(step) for step in steps] == [sorted(step) for step in undisturbed]
    assert sorted(itertools.chain(*steps)) == list(range(num_samples))


@given(sizes, st.integers(1, 3), st.integers(1, 4), changes)
def test_with_a_fixed_rank_batch_each_sample_comes_once(
    num_samples: int, accumulation: int, rank_batch: int, plan: list[tuple[int, int]]
) -> None:
    steps = disturbed(num_samples, 1, plan, accumulation=accumulation, rank_batch=rank_batch)
    assert sorted(itertools.chain(*steps)) == list(range(num_samples))
    done = 0
    for num_ranks, num_steps in plan:
        full = num_ranks * rank_batch * accumulation
        taken = [len(step) for step in steps[done : done + num_steps]]
        assert all(size == full for size in taken[:-1])
        done += len(taken)


@given(sizes, st.integers(1, 12), changes)
def test_drop_last_leaves_out_the_same_samples(
    num_samples: int, global_batch: int, plan: list[tuple[int, int]]
) -> None:
    options = {"global_batch": global_batch, "rank_batch": 2, "drop_last": True}
    steps = disturbed(num_samples, 0, plan, **options)
    assert [sorted(step) for step in steps] == [
        sorted(step) for step in disturbed(num_samples, 0, [(1, 0)], **options)
    ]
    assert len(steps) == num_samples // global_batch
    assert all(len(step) == global_batch for step in steps)


def test_no_more_samples_than_asked_for() -> None:
    samplers = [
        make(30, rank, 2, rank_batch=2, global_batch=8, max_samples=20) for rank in range(2)
    ]
    steps = list(steps_of_all(samplers))
    assert [len(step) for step in steps] == [8, 8, 4]
    assert list(itertools.chain(*map(sorted, steps))) == list(
        itertools.chain(*(sorted(samplers[0].sampler.indices()[i : i + 8]) for i in (0, 8)))
    ) + sorted(samplers[0].sampler.indices()[16:20])


def test_accumulation_follows_from_the_number_of_ranks() -> None:
    sampler = make(100, 0, 1, rank_batch=4, global_batch=24)
    found = []
    for num_ranks in (1, 2, 3, 4, 6, 8):
        sampler.rescale(0, num_ranks)
        found.append(sampler.accumulation)
        assert sampler.global_batch == 24
    assert found == [6, 3, 2, 2, 1, 1]


def test_the_global_batch_follows_from_a_fixed_rank_batch() -> None:
    sampler = make(100, 0, 1, rank_batch=4, accumulation=3)
    found = []
    for num_ranks in (1, 2, 5):
        sampler.rescale(0, num_ranks)
        found.append(sampler.global_batch)
        assert sampler.accumulation == 3
    assert found == [12, 24, 60]


def test_with_a_fixed_rank_batch_an_epoch_of_changes_has_a_length_of_its_own() -> None:
    sampler = make(144, 0, 4, rank_batch=6, accumulation=1)
    assert len(sampler) == 6
    resume(sampler, 0, 72)
    sampler.rescale(0, 3)
    assert len(sampler) == 3 + 4
    sampler.set_epoch(1)
    assert len(sampler) == 8


def test_weights_of_batches_count_from_the_epochs_start() -> None:
    sampler = make(23, 1, 2, rank_batch=3, global_batch=10)
    resume(sampler, 4, 10)
    assert sampler.sampler.start == Position(epoch=4, samples=10, steps=1)
    assert len(sampler) == 5  # 2 of the step before, 2 of a whole one, 1 of three samples
    assert [sampler.weight_of_batch(batch) for batch in (2, 3, 4)] == [1.2, 0.8, 1 * 2 * 2 / 3]
    assert sampler.shares.step(2).weight(0, 0) == 2 * 2 * 2 / 3
    with pytest.raises(LayoutError, match="Step 0 of the epoch"):
        sampler.weight_of_batch(0)


def test_an_iterator_under_way_does_not_hear_of_changes() -> None:
    sampler = make(20, 0, 2, rank_batch=5, global_batch=10)
    drawn = list(sampler.sampler.indices())
    old = iter(sampler)
    first = next(old)
    resume(sampler, 0, 10)
    sampler.rescale(1, 5)
    assert [first, *old] == [drawn[0:10:2], drawn[10:20:2]]
    assert list(sampler) == [[drawn[11], drawn[16]]]


class Loop:
    """The part of Lightning's epoch loop that fetches; restarts as it does within an epoch."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self.sampler = sampler
        loader = DataLoader[int](range(sampler.num_samples))  # type: ignore[arg-type]
        install(loader, sampler)
        self.combined = CombinedLoader(loader, "max_size_cycle")
        self.fetcher = _PrefetchDataFetcher()

    def steps(self, num_steps: int | None = None) -> Iterator[int]:
        """Batches seen in each step, until the loop would call the last one the last."""
        self.fetcher.setup(self.combined)
        iter(self.fetcher)
        ready = self.sampler.sampler.start.steps * self.sampler.accumulation
        self.fetcher.fetched += ready
        batches = 0
        while not self.fetcher.done and num_steps != 0:
            next(self.fetcher)
            ready, batches = ready + 1, batches + 1
            if ready % self.sampler.accumulation == 0 or self.fetcher.done:
                yield batches
                batches = 0
                num_steps = None if num_steps is None else num_steps - 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_lightnings_fetcher_knows_the_last_batch_after_a_change() -> None:
    sampler = make(23, 0, 4, rank_batch=2, global_batch=6)
    loop = Loop(sampler)
    assert list(loop.steps(2)) == [1, 1]
    resume(sampler, 0, 12)
    sampler.rescale(0, 1)
    assert list(loop.steps(1)) == [3]
    resume(sampler, 0, 18)
    sampler.rescale(1, 2)
    assert list(loop.steps()) == [2]
    sampler.set_epoch(1)
    assert list(loop.steps()) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Expected one of global_batch and accumulation"),
        ({"global_batch": 4, "accumulation": 2}, "global_batch=4 and accumulation=2"),
        ({"global_batch": 0}, "global_batch must be at least 1, got 0"),
        ({"accumulation": -1}, "accumulation must be at least 1, got -1"),
        ({"accumulation": 1, "max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"accumulation": 1, "rank_batch": 0}, "rank_batch must be at least 1, got 0"),
        ({"accumulation": 1, "rank": 2, "num_ranks": 2}, "Rank 2 of 2 does not exist"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    options = {"rank_batch": 2, **options}
    with pytest.raises(ConfigError, match=message):
        ElasticBatchSampler(EpochOrder(SequentialSampler(range(4))), **options)


def test_a_position_after_the_end() -> None:
    sampler = make(10, 0, 2, rank_batch=2, global_batch=4)
    with pytest.raises(LayoutError, match="Step 4 of the epoch"):
        sampler.position(4)
    with pytest.raises(LayoutError, match="Has the data set changed"):
        resume(sampler, 0, 12)
    assert sampler.position(3) == Position(epoch=0, samples=10, steps=3)
