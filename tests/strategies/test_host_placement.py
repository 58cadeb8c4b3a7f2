"""What a run says of the hosts that its ranks are on."""

import pytest

from lightning_shard.mesh import ParallelMesh
from lightning_shard.strategies.host_placement import (
    are_neighbours,
    told_placement,
    warning_of_scattered_ranks,
)


@pytest.mark.parametrize(
    ("hosts", "neighbours"),
    [
        ([0, 0, 1, 1], True),
        ([1, 1, 0, 0], True),
        ([0, 0, 0, 0], True),
        ([0, 1, 0, 1], False),
        ([0, 1, 1, 0], False),
    ],
)
def test_ranks_of_a_host_follow_each_other(hosts: list[int], neighbours: bool) -> None:
    assert are_neighbours(hosts) == neighbours


def test_scattered_ranks_are_told_with_what_would_not_scatter_them() -> None:
    mesh = ParallelMesh(pp=2, tp=2)
    told = warning_of_scattered_ranks(mesh, [0, 1, 0, 1])
    assert "rank 0's host has ranks 0, 2. So 2 of 2 tp groups cross hosts" in told
    assert "`srun --distribution=block`" in told
    told = warning_of_scattered_ranks(ParallelMesh(pp=2, dp=2), [0, 1, 0, 1])
    assert told.endswith(
        "rank 0's host has ranks 0, 2. Have the ranks numbered host by host: "
        "`mpirun --map-by slot` or `srun --distribution=block`."
    )


def test_the_line_of_a_run_over_hosts() -> None:
    assert told_placement(ParallelMesh(pp=2, tp=2), 2) == (
        "ParallelMesh(pp=2, dp=1, tp=2) on nodes of 2 ranks: 2; tp inside a node; pp across 2 nodes"
    )
