"""`bucket_mb="auto"`: all ranks of a mesh choose one size, whatever each of them measures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel import bucket_choice
from lightning_shard.data_parallel.bucket_choice import (
    IN_PROCESS,
    ONE_RANK,
    BucketChoice,
    Links,
    LinkTrial,
    choose,
    slowest,
)
from lightning_shard.data_parallel.bucket_sizes import LinkFigures
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies
from tests.groups import all_ranks, join
from tests.processes import run_processes

CPU = torch.device("cpu")
BANDWIDTHS = (4e9, 1e9, 2.5e8, 1e8)  # of the ranks, in bytes a second


def given_seconds(trial: LinkTrial, num_bytes: int, times: int) -> float:
    """Take the place of a measurement, with a link that differs from rank to rank."""
    return 4e-4 + num_bytes / BANDWIDTHS[dist.get_rank()]


def models(sizes: list[int]) -> nn.ModuleList:
    """Return a model of so many MB on this rank; without values."""
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(2**18, 1, bias=False) for _ in range(sizes[dist.get_rank()]))


def choice_of_rank(
    num_groups: int, sizes: list[int], backend: str, options: EngineOptions
) -> BucketChoice:
    """Choose on a rank of so many data-parallel groups."""
    made, world = get_backend(backend), dist.group.WORLD
    assert world is not None
    size = dist.get_world_size() // num_groups
    first = dist.get_rank() // size * size
    own = dist.new_group([*range(first, first + size)], use_local_synchronization=True)
    groups = DataGroups.of(made.collectives(own))
    everybody = made.collectives(world)
    links = Links(groups=groups, reducing=groups.duplicate(), everybody=everybody, device=CPU)
    return choose(options, models(sizes), links)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("num_groups", "sizes"), [(1, [400] * 4), (2, [400, 400, 90, 90])], ids=["group", "groups"]
)
def test_all_ranks_choose_one_size(
    monkeypatch: pytest.MonkeyPatch, stage: int, num_groups: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(LinkTrial, "seconds", given_seconds)
    options = EngineOptions(stage=stage, bucket_mb="auto")
    found = run_ranks(lambda rank: choice_of_rank(num_groups, sizes, "in_process", options), 4)
    assert [*map(str, found)] == ["buckets of 2 MB (measured: 0.41 ms, 0.1 GB/s)"] * 4


def test_the_smallest_part_of_a_model_bounds_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkTrial, "seconds", lambda trial, num_bytes, times: 1e-3)
    options = EngineOptions(stage=2, bucket_mb="auto")
    for sizes, mb in (([400] * 4, 64), ([400, 400, 26, 26], 8), ([400, 400, 0, 0], 1)):
        found = run_ranks(lambda rank, s=sizes: choice_of_rank(2, s, "in_process", options).mb, 4)
        assert found == [mb] * 4


def test_formats_are_those_that_travel_also_where_models_differ_by_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class Noted(LinkTrial):
        def __init__(self, *args: Any, **formats: Any) -> None:
            seen.append(tuple(formats.values()))
            super().__init__(*args, **formats)

    def on_rank(rank: int, options: EngineOptions) -> None:
        ranks = DataGroups.of(all_ranks())
        links = Links(groups=ranks, reducing=ranks, everybody=ranks.dp, device=CPU)
        model = nn.Linear(8, 8, dtype=torch.float64 if rank else torch.float32)
        choose(options, nn.ModuleList([model, nn.LazyLinear(8)]), links)

    monkeypatch.setattr(bucket_choice, "LinkTrial", Noted)
    monkeypatch.setattr(LinkTrial, "seconds", lambda trial, num_bytes, times: 1e-3)
    half = DTypePolicy(compute=torch.bfloat16)
    for dtypes in (DTypePolicy(), half, DTypePolicy(reduce=torch.float16)):
        options = EngineOptions(stage=1, bucket_mb="auto", dtypes=dtypes)
        run_ranks(lambda rank, options=options: on_rank(rank, options), 2)
    f64 = torch.float64
    assert (
        seen[::2]
        == seen[1::2]
        == [
            (f64, f64, f64),
            (f64, f64, f64),  # which autocast leaves as they are
            (f64, f64, torch.float16),
        ]
    )


@pytest.mark.parametrize(("stage", "mb"), [(0, 25.0), (3, 12.5)])
def test_nothing_is_measured_within_one_process_or_where_nothing_travels(
    stage: int, mb: float
) -> None:
    options = EngineOptions(stage=stage, bucket_mb="auto")
    assert options.unit_mb == mb

    def on_rank(rank: int) -> list[BucketChoice]:
        ranks = DataGroups.of(all_ranks())
        own = dist.new_group([rank], use_local_synchronization=True)
        alone = DataGroups.of(get_backend("in_process").collectives(own))
        model, common = nn.Linear(4, 4), {"everybody": ranks.dp, "device": CPU}
        return [
            choose(options, model, Links(groups=ranks, reducing=ranks, are_timed=False, **common)),
            choose(options, model, Links(groups=alone, reducing=alone, **common)),
        ]

    expected = [BucketChoice(mb=mb, reason=IN_PROCESS), BucketChoice(mb=mb, reason=ONE_RANK)]
    assert run_ranks(on_rank, 2) == [expected] * 2


def test_the_slowest_link_is_that_of_the_longest_usual_bucket() -> None:
    slim = LinkFigures(fixed_seconds=1e-4, seconds_per_mb=1e-2)
    late = LinkFigures(fixed_seconds=1e-2, seconds_per_mb=1e-3)
    assert slowest([late, slim, late]) == slim


def choice_on_processes(backend: str, given: bool) -> tuple[BucketChoice, float]:
    """Choose on real ranks, by real times or by given ones; for `run_processes`."""
    import time

    if given:
        LinkTrial.seconds = given_seconds  # type: ignore[method-assign]
    size = join(backend).size
    begin = time.perf_counter()
    options = EngineOptions(stage=2, bucket_mb="auto")
    found = choice_of_rank(1, [400] * size, backend, options)
    seconds = time.perf_counter() - begin
    dist.destroy_process_group()
    return found, seconds


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_processes_agree_on_what_they_measure(backend: str) -> None:
    (mine, _), (theirs, _) = run_processes(choice_on_processes, 2, backend=backend, given=False)
    assert mine == theirs
    assert mine.reason.startswith("measured: ")


def test_processes_agree_where_each_measures_something_else() -> None:
    found = run_processes(choice_on_processes, 2, backend="gloo", given=True)
    assert [str(choice) for choice, _ in found] == [
        "buckets of 16 MB (measured: 0.4 ms, 1 GB/s)"
    ] * 2


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
    groups: Callable[[], DataGroups] = lambda: DataGroups.of(all_ranks()),
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
