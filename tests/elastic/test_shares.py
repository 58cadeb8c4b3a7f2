"""Every sample of an epoch once, the same ones in each step, whatever the number of ranks."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_shard.elastic.shares import EpochShares, StepShares
from lightning_shard.errors import LayoutError

sizes = st.integers(1, 40)
ranks = st.integers(1, 9)
batches = st.integers(1, 7)


def cells(step: StepShares) -> list[tuple[int, int]]:
    return list(itertools.product(range(step.num_microbatches), range(step.num_ranks)))


def whole_step(num_samples: int, num_ranks: int, rank_batch: int) -> StepShares:
    accumulation = -(-num_samples // (num_ranks * rank_batch))
    return StepShares(
        num_samples=num_samples,
        num_ranks=num_ranks,
        rank_batch=rank_batch,
        accumulation=accumulation,
    )


def table(step: StepShares) -> list[list[list[int]]]:
    return [
        [list(step.places(microbatch, rank)) for rank in range(step.num_ranks)]
        for microbatch in range(step.num_microbatches)
    ]


def test_shares_on_two_ranks() -> None:
    assert table(whole_step(10, 2, 3)) == [[[0, 2, 4], [1, 3, 5]], [[6, 8], [7, 9]]]


def test_shares_on_four_ranks() -> None:
    assert table(whole_step(10, 4, 3)) == [[[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]]


def test_ranks_without_a_sample_borrow_one() -> None:
    step = whole_step(2, 4, 3)
    assert table(step) == [[[0], [1], [0], [1]]]
    assert [step.weight(0, rank) for rank in range(4)] == [2.0, 2.0, 0.0, 0.0]


def test_one_sample_at_once_leaves_microbatches_without() -> None:
    step = whole_step(5, 4, 1)
    assert table(step) == [[[0], [1], [2], [3]], [[4], [1], [2], [3]]]
    assert [step.weight(1, rank) for rank in range(4)] == [1.6, 0.0, 0.0, 0.0]


def test_weights_are_exactly_one_where_all_are_alike() -> None:
    for num_ranks, rank_batch, accumulation in itertools.product(range(1, 8), repeat=3):
        step = whole_step(num_ranks * rank_batch * accumulation, num_ranks, rank_batch)
        assert {step.weight(*cell) for cell in cells(step)} == {1.0}


@given(sizes, ranks, batches)
def test_each_sample_counts_once(num_samples: int, num_ranks: int, rank_batch: int) -> None:
    step = whole_step(num_samples, num_ranks, rank_batch)
    counted = [step.places(*cell) for cell in cells(step) if step.size(*cell)]
    assert sorted(itertools.chain(*counted)) == list(range(num_samples))


@given(sizes, ranks, batches)
def test_shares_are_even(num_samples: int, num_ranks: int, rank_batch: int) -> None:
    step = whole_step(num_samples, num_ranks, rank_batch)
    counted = [step.size(*cell) for cell in cells(step)]
    assert max(counted) <= rank_batch
    assert max(counted) - min(counted) <= 1
    assert all(len(step.places(*cell)) == max(step.size(*cell), 1) for cell in cells(step))
    assert all(place < num_samples for cell in cells(step) for place in step.places(*cell))
    if num_samples >= num_ranks and rank_batch > 1:
        assert min(counted) >= 1


@given(sizes, ranks, batches, st.integers(0, 2**31), st.integers(1, 40))
def test_weighted_means_are_the_mean_over_the_step(
    full: int, num_ranks: int, rank_batch: int, seed: int, num_samples: int
) -> None:
    num_samples = min(num_samples, full)  # a last step may be smaller
    step = StepShares(
        num_samples=num_samples,
        num_ranks=num_ranks,
        rank_batch=rank_batch,
        accumulation=whole_step(full, num_ranks, rank_batch).accumulation,
    )
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(num_samples, dtype=torch.float64, generator=generator)
    by_rank = [0.0] * num_ranks
    for microbatch, rank in cells(step):
        loss = losses[list(step.places(microbatch, rank))].mean()
        by_rank[rank] += (loss * step.weight(microbatch, rank) / step.accumulation).item()
    mean = math.fsum(by_rank) / num_ranks
    assert mean == pytest.approx(losses.mean().item(), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("num_samples", [8, 16, 12, 24])
def test_a_shorter_last_step_counts_as_on_one_device(num_samples: int) -> None:
    """One device accumulates three batches of 8 and divides by three, however many there are."""
    for num_ranks, rank_batch in itertools.product(range(1, 6), range(1, 5)):
        shares = EpochShares(
            num_samples=24 + num_samples,
            step_samples=24,
            num_ranks=num_ranks,
            rank_batch=rank_batch,
            step_batches=3,
        )
        for step, share in ((0, 1.0), (1, math.ceil(num_samples / 8) / 3)):
            assigned = shares.step(step)
            weights = math.fsum(assigned.weight(*cell) for cell in cells(assigned))
            assert weights / assigned.accumulation / num_ranks == pytest.approx(share)


@pytest.mark.parametrize("num_samples", [8, 12, 19, 20, 23, 24])
def test_a_smaller_last_batch_counts_as_much_as_the_others_of_its_step(num_samples: int) -> None:
    """Each batch that is accumulated is a mean; the samples of a smaller one counted less."""
    losses = torch.randn(num_samples, dtype=torch.float64)
    expected = sum(part.mean() for part in losses.split(8)) / 3
    for num_ranks, rank_batch in itertools.product(range(1, 9), [1, 2, 4, 8]):
        shares = EpochShares(
            num_samples=num_samples,
            step_samples=24,
            num_ranks=num_ranks,
            rank_batch=rank_batch,
            step_batches=3,
        )
        step = shares.step(0)
        means = [
            losses[list(step.places(*cell))].mean() * step.weight(*cell) for cell in cells(step)
        ]
        assert step.num_microbatches <= step.accumulation
        assert all(len(step.places(*cell)) <= rank_batch for cell in cells(step))
        torch.testing.assert_close(sum(means) / step.accumulation / num_ranks, expected)


def test_the_last_batch_begins_with_a_microbatch_where_it_can() -> None:
    """Then each rank's loss is that of a batch, as one device has it."""
    options = {"num_samples": 12, "step_samples": 16, "rank_batch": 4, "step_batches": 2}
    assert table(EpochShares(num_ranks=2, **options).step(0)) == [
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[8, 10], [9, 11]],
    ]
    assert table(EpochShares(num_ranks=4, **options).step(0)) == [
        [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9, 11]]
    ]


def epoch_sets(
    num_samples: int, step_samples: int, rank_batch: int, sizes_by_step: list[int]
) -> list[list[int]]:
    """The samples of each step that count, where the size changes before each."""
    found: list[list[int]] = []
    done = 0
    for num_ranks in itertools.cycle(sizes_by_step):
        shares = EpochShares(
            num_samples=num_samples,
            step_samples=step_samples,
            num_ranks=num_ranks,
            rank_batch=rank_batch,
            samples_done=done,
            steps_done=len(found),
        )
        if not shares.steps:
            return found
        begin, step = shares.begin(len(found)), shares.step(len(found))
        taken = [begin + p for cell in cells(step) if step.size(*cell) for p in step.places(*cell)]
        found.append(sorted(taken))
        done = shares.begin(len(found))
    return found


@given(st.integers(1, 60), sizes, batches, st.lists(ranks, min_size=1, max_size=6))
def test_steps_hold_the_same_samples_whatever_the_sizes(
    num_samples: int, step_samples: int, rank_batch: int, changes: list[int]
) -> None:
    disturbed = epoch_sets(num_samples, step_samples, rank_batch, changes)
    assert disturbed == epoch_sets(num_samples, step_samples, rank_batch, [1])
    assert list(itertools.chain(*disturbed)) == list(range(num_samples))


@given(st.integers(1, 60), sizes, batches, ranks, st.booleans(), st.integers(0, 60))
def test_number_of_batches(
    num_samples: int, step: int, rank_batch: int, num_ranks: int, drop_last: bool, done: int
) -> None:
    shares = EpochShares(
        num_samples=num_samples,
        step_samples=step,
        num_ranks=num_ranks,
        rank_batch=rank_batch,
        drop_last=drop_last,
        samples_done=min(done * step, num_samples),
        steps_done=min(done, -(-num_samples // step)),
    )
    left = [shares.step(index).num_microbatches for index in shares.steps]
    assert shares.num_batches == shares.steps_done * shares.accumulation + sum(left)
    assert all(number == shares.accumulation for number in left[:-1])
    assert all(1 <= number <= shares.accumulation for number in left)
    if drop_last:
        assert all(shares.step(index).num_samples == step for index in shares.steps)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equal_shares_are_those_of_torchs_distributed_sampler(num_ranks: int) -> None:
    rank_batch, num_batches = 3, 4
    data = range(num_ranks * rank_batch * num_batches)
    shares = EpochShares(
        num_samples=len(data),
        step_samples=2 * rank_batch * num_ranks,
        num_ranks=num_ranks,
        rank_batch=rank_batch,
    )
    for rank in range(num_ranks):
        assigned = [
            shares.begin(step) + place
            for step in shares.steps
            for microbatch in range(shares.accumulation)
            for place in shares.step(step).places(microbatch, rank)
        ]
        theirs = DistributedSampler[int](data, num_ranks, rank, False)  # type: ignore[arg-type]
        assert assigned == list(theirs)


def test_steps_of_before_and_after_are_errors() -> None:
    shares = EpochShares(
        num_samples=10, step_samples=4, num_ranks=1, rank_batch=4, samples_done=4, steps_done=1
    )
    assert Counter(shares.steps) == Counter([1, 2])
    assert shares.begin(3) == 10
    for step in (0, 4):
        with pytest.raises(
            LayoutError, match=f"Step {step} of the epoch .* expected one of 1 to 3"
        ):
            shares.begin(step)
    with pytest.raises(LayoutError, match="Step 4"):
        shares.step(3)
