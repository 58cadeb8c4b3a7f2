"""Runs of different kinds in one script: each trains as if it were the only one."""

import json
from pathlib import Path

import pytest

from tests.elastic.kinds import NUM_RANKS, expected_of, train
from tests.processes import Finished, run_alone, run_processes
from tests.strategies.parity import ignoring

pytestmark = ignoring()
_SECONDS = 240
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS))


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_port_of_an_elastic_fit_after_others_is_free(num_nodes: int) -> None:
    """The port of an elastic fit after others was taken by theirs."""
    kinds = ["zero3", "fabric", "elastic", "local_sgd", "elastic"]
    expected = [expected_of(kind) for kind in kinds]
    for totals in run_processes(train, NUM_RANKS, kinds=kinds, num_nodes=num_nodes):
        assert totals == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("launcher", [(), _TORCHRUN], ids=["trainer", "torchrun"])
def test_launchers_start_a_script_of_different_kinds(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    kinds = ["tensor_parallel", "zero2", "elastic", "fabric", "zero3", "elastic"]
    done = run_script(launcher, tmp_path, kinds)
    assert done.returncode == 0, done.output
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    for number, kind in enumerate(kinds[1:], 1):
        totals = [told[f"{number}-{rank}"] for rank in range(NUM_RANKS)]
        assert totals == pytest.approx([expected_of(kind)] * NUM_RANKS, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS)
def test_ranks_that_are_left_of_an_elastic_fit_after_another_go_on(tmp_path: Path) -> None:
    done = run_script((), tmp_path, ["zero2", "elastic, dies", "zero3"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0"], done.output
    assert "rank 1 died" in done.output
    assert done.returncode != 0
    assert "Rank 0 of 1: this Trainer would make it rank 0 of 2" in done.output


def run_script(launcher: tuple[str, ...], folder: Path, kinds: list[str]) -> Finished:
    arguments = (*launcher, "-m", "tests.elastic.kinds", str(folder), *kinds)
    return run_alone(*arguments, timeout_seconds=_SECONDS)
