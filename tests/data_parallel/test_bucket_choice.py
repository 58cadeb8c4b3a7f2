"""`bucket_mb="auto"`: all ranks of a mesh choose one size, whatever each of them measures."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel import bucket_choice
from lightning_shard.data_parallel.bucket_choice import (
    IN_PROCESS,
    ONE_RANK,
    BucketChoice,
    Links,
    choose,
    slowest,
)
from lightning_shard.data_parallel.bucket_sizes import LinkFigures
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.link_trial import LinkTrial
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.testing import run_ranks
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
        ranks = DataGroups.of(get_backend("in_process").collectives(dist.group.WORLD))
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
        ranks = DataGroups.of(get_backend("in_process").collectives(dist.group.WORLD))
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
    import os
    import time
    from datetime import timedelta

    if given:
        LinkTrial.seconds = given_seconds  # type: ignore[method-assign]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    get_backend(backend).init_process_group(
        rank=rank, world_size=size, device=CPU, timeout=timedelta(minutes=1)
    )
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
