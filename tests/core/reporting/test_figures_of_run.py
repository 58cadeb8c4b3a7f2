"""The report's figures, computed by hand from small runs."""

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.core.reporting import figures_of_run as figures
from lightning_shard.core.reporting.figures_of_run import memory_of_ranks, planned
from lightning_shard.core.reporting.records import RunRecords, read_run
from tests.core.reporting.runs import dry_run, fit, step, traffic, whole_run, write


@pytest.fixture
def run(tmp_path: Path) -> RunRecords:
    return read_run(write(tmp_path, whole_run()))


def read(folder: Path, records: list[dict[str, Any]]) -> RunRecords:
    return read_run(write(folder, records))


def test_the_loss_is_the_mean_over_the_ranks(run: RunRecords) -> None:
    assert figures.curve(run)[:2] == [(1, 5.25), (2, 2.75)]
    assert figures.validated(run) == {"val_loss": [(5, 0.75)]}


def test_first_steps_are_left_out_where_there_are_others(run: RunRecords, tmp_path: Path) -> None:
    assert list(figures.steady_steps(run)) == [2, 3, 4, 5]
    short = read(tmp_path / "short", [fit(0), step(0, 1)])
    assert list(figures.steady_steps(short)) == [1]


def test_parts_are_means_over_the_ranks(run: RunRecords) -> None:
    parts = figures.split_of_steps(run)[2]
    assert parts["compute"] == 2.5
    assert parts["waiting pp"] == 0.5
    assert sum(parts.values()) == 4.0


def test_the_straggler_is_the_rank_with_most_of_its_own_to_do(run: RunRecords) -> None:
    times = figures.rank_times(run)
    assert [one.own_seconds for one in times] == [2.875, 2.875, 3.875, 3.875]
    assert [one.times_slowest for one in times] == [0, 0, 4, 0]


def test_ranks_of_one_model_count_their_tokens_once(run: RunRecords) -> None:
    assert figures.per_second(run, "tokens")[0] == (2, 2 * 1024 / 4.0)
    assert figures.per_second(run, "samples")[0] == (2, 2 * 8 / 4.0)


def test_a_step_of_which_a_rank_is_missing_has_no_rate(tmp_path: Path) -> None:
    records = [fit(0), fit(1), *(step(0, n) for n in (1, 2, 3)), step(1, 1), step(1, 2)]
    assert [n for n, _ in figures.per_second(read(tmp_path, records), "tokens")] == [2]


def test_mfu_is_the_models_arithmetic_over_the_peak_of_all_ranks(run: RunRecords) -> None:
    found = figures.arithmetic(run)
    assert found is not None
    assert found.flops_per_second[0] == (2, 512 * 1000.0 / 4)  # on four ranks
    assert found.utilization[0] == (2, 0.128)


def test_traffic_is_that_of_a_step_beside_the_dry_run(run: RunRecords) -> None:
    dp, pp = figures.axis_figures(run)
    assert (dp.axis, dp.sent, dp.expected) == ("dp", 1000.0, 1000)
    assert (pp.axis, pp.sent, pp.expected) == ("pp", 1000.0, 900)
    assert pp.operations["send"] == (2.0, 1000.0, 0.125)
    assert pp.waited == 0.125


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": [], "obstacle": "ConfigError: elements"}, "ConfigError: elements"),
        ({"every_step": False}, "do not meet at every step"),
    ],
)
def test_why_traffic_is_not_compared(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    records = [fit(0), dry_run() | changes, step(0, 1), traffic(0, 2, 1000)]
    run = read(tmp_path, records)
    assert said in figures.why_not_compared(run)
    assert {one.expected for one in figures.axis_figures(run)} == {None}


def test_accumulated_gradients_are_not_compared(tmp_path: Path) -> None:
    run = read(tmp_path, [fit(0, accumulate=4), dry_run(), traffic(0, 2, 1000)])
    assert "several batches" in figures.why_not_compared(run)


def test_gathers_over_shared_memory_are_not_compared_with_a_rings(tmp_path: Path) -> None:
    """The page told -65.7 % under "as a ring would send them"."""
    sent = traffic(0, 2, 1000)
    counted = {"calls": 4, "bytes": 0, "seconds": 0.5, "waited": 0.25}
    gathered = {**sent, "axes": {"dp": sent["axes"]["dp"] | {"all_gather": counted}}}
    for backend, is_compared in (("shm", False), ("gloo", True)):
        run = read(tmp_path / backend, [fit(0, backend=backend), dry_run(), gathered])
        assert ("gathers send nothing" in figures.why_not_compared(run)) is not is_compared
        (dp,) = figures.axis_figures(run)
        assert (dp.expected is not None) is is_compared
    assert not figures.why_not_compared(read(tmp_path, [fit(0, backend="shm"), dry_run(), sent]))


def test_with_parts_of_sequences_dp_and_cp_are_one_row(tmp_path: Path) -> None:
    counted = {"calls": 1, "bytes": 100, "seconds": 0.0, "waited": 0.0}
    axes = {
        "dp+cp": {"all_reduce": counted},
        "cp": {"all_to_all": counted},
        "tp": {"send": counted},
    }
    expected = dry_run()
    for one in expected["ranks"]:
        one["sent"] = {"pp": 0, "dp": 120, "cp": 80, "tp": 100}
    mesh = {"pp": 1, "dp": 2, "cp": 2, "tp": 1}
    records = [fit(0, mesh=mesh), expected, traffic(0, 2, 0) | {"axes": axes, "steps": 1}]
    rows = figures.axis_figures(read(tmp_path, records))
    assert [(one.axis, one.sent, one.expected) for one in rows] == [
        ("dp and cp", 200.0, 200),
        ("tp", 100.0, 100),
    ]


def test_memory_is_beside_that_of_the_ranks_own_stage(run: RunRecords) -> None:
    last = memory_of_ranks(run)[3]
    assert last.held == {"parameters": 4096, "gradients": 2048, "optimizer state": 8195}
    assert last.expected is not None
    assert last.expected["activations"] == 65536
    assert last.peak == 1 << 30


@pytest.mark.parametrize("inside", [True, False])
def test_a_plan_is_read_as_the_command_prints_it_or_alone(inside: bool, run: RunRecords) -> None:
    row = {"memory": {"parameters": 10, "passing": 5, "peak": 15, "gathered": 0}}
    run.plan = {"recommendation": row} if inside else row
    assert planned(run) == {"parameters": 10, "passing": 5}
    run.plan = {"recommendation": None}
    assert planned(run) is None
