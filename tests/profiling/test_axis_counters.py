"""Counters by axis: what a group's axis is, and what counts since when."""

import pytest
import torch
import torch.distributed as dist

from lightning_shard import ZeRO2Strategy
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.traffic import OperationTraffic
from lightning_shard.mesh import ParallelMesh
from lightning_shard.profiling.axis_counters import AxisCounters, axis_of, seconds_in, waited
from lightning_shard.testing import run_ranks


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        ((0, 1), "tp"),
        ((0, 2), "dp"),
        ((0, 4), "pp"),
        ((0, 1, 4, 5), "pp+tp"),
        (tuple(range(8)), "pp+dp+tp"),
        ((3,), ""),
        ((0, 8), "other"),
    ],
)
def test_a_groups_axis_is_where_its_ranks_differ(ranks: tuple[int, ...], axis: str) -> None:
    assert axis_of(ParallelMesh(pp=2, dp=2, tp=2), ranks) == axis


class _TwoRanks(ZeRO2Strategy):
    """Knows its mesh without a Trainer."""

    mesh = ParallelMesh(dp=2)  # type: ignore[assignment]


def _counted_twice(rank: int) -> list[tuple[int, int]]:
    group = get_backend("in_process").collectives(dist.group.WORLD)
    group.all_reduce(torch.ones(4)).wait()
    counters = AxisCounters(_TwoRanks(backend="in_process"))
    found = []
    for numel in (6, 10):
        group.all_reduce(torch.ones(numel)).wait()
        one = counters.since()["dp"]["all_reduce"]
        found.append((one.calls, one.bytes))
    assert counters.since() == {}
    return found


def test_what_was_sent_before_does_not_count_again() -> None:
    assert run_ranks(_counted_twice, 2) == [[(1, 24), (1, 40)]] * 2  # 2n(N-1)/N elements of 4


def test_sums_of_seconds() -> None:
    traffic = {
        "dp": {
            "all_gather": OperationTraffic(seconds=3.0, seconds_waited=2.0),
            "all_reduce": OperationTraffic(seconds=1.0, seconds_waited=0.5),
        },
        "tp": {"all_reduce": OperationTraffic(seconds=0.25, seconds_waited=0.25)},
    }
    assert waited(traffic) == {"dp": 2.5, "tp": 0.25}
    assert seconds_in(traffic) == 4.25
