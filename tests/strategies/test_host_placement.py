"""What a run says of the hosts that its ranks are on."""

import logging
import os
import warnings
from typing import Any

import pytest

from examples.train_gpt import GPT, Text
from lightning_shard import PipelineParallelStrategy, TensorParallelStrategy
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.strategies.groups import (
    are_neighbours,
    tell_placement,
    warning_of_scattered_ranks,
)
from tests.processes import run_processes
from tests.strategies.parity import ignore_upstream_warnings
from tests.trainers import cpu_trainer


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


def test_copies_of_the_state_whose_ranks_are_scattered_are_told() -> None:
    """Copies of the state whose ranks are scattered were not told."""
    told = warning_of_scattered_ranks(ParallelMesh(dp=4, shard=2), [0, 1, 0, 1])
    assert "So 2 of 2 copies of the state cross hosts, and gathers wait" in told
    assert "tp groups" not in told


def test_ranks_of_a_sequence_share_a_copy_of_the_state() -> None:
    """Each half of a sequence counted as a copy of its own."""
    mesh = ParallelMesh(dp=4, cp=2, shard=2)
    assert mesh.copies == [[(0, 1, 2, 3), (4, 5, 6, 7)]]
    told = warning_of_scattered_ranks(mesh, [0, 0, 1, 1, 0, 0, 0, 0])
    assert "So 1 of 2 copies of the state cross hosts" in told


def test_the_line_of_a_run_over_hosts(caplog: pytest.LogCaptureFixture) -> None:
    mesh = ParallelMesh(pp=2, tp=2)
    with caplog.at_level("INFO"):
        tell_placement(mesh, mesh.placement(2), [0, 0, 1, 1], announces=False)
        assert not caplog.messages
        tell_placement(mesh, mesh.placement(2), [0, 0, 1, 1], announces=True)
    assert caplog.messages == [
        "ParallelMesh(pp=2, dp=1, tp=2) on nodes of 2 ranks: 2; tp inside a node; pp across 2 nodes"
    ]


def test_sizes_that_put_layers_across_hosts_are_told() -> None:
    mesh = ParallelMesh(tp=4)
    with pytest.warns(UserWarning, match="1 of 1 tp groups cross nodes of 2 ranks"):
        tell_placement(mesh, mesh.placement(2), [0, 0, 1, 1], announces=False)


def said_over_two_hosts() -> dict[str, list[str]]:
    """Train a step on a rank of each of two hosts; return by strategy what was said of hosts."""
    ignore_upstream_warnings()
    os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    strategies: dict[str, Any] = {
        "tensor_parallel": TensorParallelStrategy(backend="gloo"),
        "pipeline_parallel": PipelineParallelStrategy(backend="gloo"),
    }
    return {name: _said(strategy) for name, strategy in strategies.items()}


def _said(strategy: Any) -> list[str]:
    trainer = cpu_trainer(strategy=strategy, devices=1, num_nodes=2, max_steps=1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trainer.fit(GPT(num_layers=2, width=32), datamodule=Text(batch_size=8))
    logging.getLogger("lightning.pytorch").removeHandler(handler)
    said = [*lines, *(str(one.message) for one in caught)]
    return [one for one in said if " on nodes of " in one or " cross nodes of " in one]


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_tell_of_hosts() -> None:
    """Tensor and pipeline parallel said nothing of hosts."""
    first, other = run_processes(said_over_two_hosts, 2)
    line, warning = sorted(first["tensor_parallel"], key=lambda one: "cross" in one)
    assert line.endswith("on nodes of 1 ranks: 2; tp across 2 nodes")
    assert warning.startswith("1 of 1 tp groups cross nodes of 1 ranks, such as ranks 0, 1:")
    [line] = first["pipeline_parallel"]
    assert line.endswith("on nodes of 1 ranks: 2; pp across 2 nodes")
    assert other == {"tensor_parallel": [], "pipeline_parallel": []}
