"""Which rounds are timed on which links, and what they come to; times are given, not taken."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel.bucket_sizes import LinkFigures
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.link_trial import LinkTrial
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies

F32 = torch.float32
KB = 2**10
GROWTH = [16 * KB, 64 * KB, 256 * KB, 2**20, 2**22, 2**24]


class GivenTimes(LinkTrial):
    """Sends each round once, and takes its time from a function of its bytes and the rank."""

    seconds_of: Callable[[int, int], float]

    def seconds(self, num_bytes: int, times: int) -> float:
        self.spent += times * self.seconds_of(num_bytes, self._groups.dp.rank)
        self.sizes.append(num_bytes)
        if num_bytes <= 64 * KB:
            super().seconds(num_bytes, 1)
        return self.seconds_of(num_bytes, self._groups.dp.rank)


def given_times(
    seconds_of: Callable[[int, int], float],
    *,
    stage: int = 2,
    groups: Callable[[], DataGroups] = lambda: DataGroups.of(Collectives(dist.group.WORLD)),
    num_ranks: int = 2,
    dtype: torch.dtype = F32,
) -> list[tuple[LinkFigures, list[int], float]]:
    """Return figures, sizes and seconds on each rank."""

    def on_rank(rank: int) -> tuple[LinkFigures, list[int], float]:
        of_rank = groups()
        trial = GivenTimes(
            stage,
            of_rank,
            of_rank.duplicate(),
            torch.device("cpu"),
            param_dtype=F32,
            gather_dtype=dtype,
            reduce_dtype=dtype,
        )
        trial.seconds_of, trial.sizes, trial.spent = seconds_of, [], 0.0
        return trial.figures(), trial.sizes, trial.spent

    found = run_ranks(on_rank, num_ranks)
    return [one for one in found if one is not None]


def linear(fixed: float, bytes_per_second: float) -> Callable[[int, int], float]:
    return lambda num_bytes, rank: fixed + num_bytes / bytes_per_second


@pytest.mark.parametrize(
    ("fixed", "bytes_per_second", "largest", "most_seconds"),
    [
        (5e-5, 1e11, 2**24, 0.7),
        (3e-4, 1e9, 2**24, 0.7),
        (3e-4, 1.25e8, 2**24, 0.7),  # 1 Gbit/s
        (3e-4, 1.25e7, 2**20, 0.7),
        (4e-2, 1.25e5, 16 * KB, 1.0),  # 1 Mbit/s
        (1.0, 1.25e5, 16 * KB, 4.0),  # by satellite, over several hops
    ],
)
def test_a_slow_link_ends_the_trials_early(
    fixed: float, bytes_per_second: float, largest: int, most_seconds: float
) -> None:
    (figures, sizes, spent), other = given_times(linear(fixed, bytes_per_second))
    assert other[:2] == (figures, sizes)
    grown = GROWTH[: GROWTH.index(largest) + 1]
    assert [size for size in sizes if size > KB][: len(grown)] == grown
    assert max(sizes) == largest
    assert spent < most_seconds
    assert figures.seconds_per_mb == pytest.approx(2**20 / bytes_per_second, rel=0.1)
    assert figures.fixed_seconds == pytest.approx(fixed + KB / bytes_per_second)


def test_the_slowest_rank_counts_at_each_size() -> None:
    def seconds_of(num_bytes: int, rank: int) -> float:
        return 1e-3 + num_bytes / (1e9 if rank == 1 else 2e9)

    found = given_times(seconds_of, num_ranks=3)
    assert [one[:2] for one in found] == [found[0][:2]] * 3
    assert found[0][0].seconds_per_mb == pytest.approx(2**20 / 1e9, rel=0.1)


def test_what_disturbs_the_small_rounds_is_no_fixed_cost() -> None:
    def seconds_of(num_bytes: int, rank: int) -> float:
        return 8e-3 if num_bytes == KB else 1e-4 + num_bytes / 1e9

    figures = given_times(seconds_of)[0][0]
    assert figures.fixed_seconds == pytest.approx(1e-4 + 16 * KB / 1e9)


def test_large_rounds_that_take_no_longer_are_no_endless_bandwidth() -> None:
    figures = given_times(lambda num_bytes, rank: 1e-3)[0][0]
    assert figures == LinkFigures(fixed_seconds=1e-3, seconds_per_mb=1e-4 / 16)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("num_copies", [1, 2])
def test_rounds_are_the_operations_of_a_stage(
    stage: int, num_copies: int, dtype: torch.dtype
) -> None:
    counted: list[Traffic] = []

    def groups() -> DataGroups:
        made = in_copies(num_copies)
        if dist.get_rank() == 0:
            counted.extend(one.traffic for one in made.all)
        return made

    given_times(linear(1e-3, 1e9), stage=stage, groups=groups, num_ranks=4, dtype=dtype)
    dp, shard, *replicate = map(set, counted)
    assert "all_reduce" in dp  # also the agreement on times
    sharded = {"reduce_scatter", "all_gather"} if stage else set()
    assert shard - {"all_reduce", "barrier"} == sharded
    assert replicate == [{"all_reduce"} if stage else set()] * (num_copies - 1)
