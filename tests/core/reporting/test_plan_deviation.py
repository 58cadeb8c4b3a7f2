"""What was planned beside what a run has measured, of figures that the tests choose."""

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.core.reporting.page import page_of
from lightning_shard.core.reporting.plan_deviation import Deviation, deviations, why_of_another_run
from lightning_shard.core.reporting.records import RunRecords, read_run
from tests.core.reporting.runs import whole_run, write

CHOSEN = {
    "strategy": "hybrid_parallel",
    "pp": 2,
    "dp": 2,
    "tp": 1,
    "memory": {
        "parameters": 4000,
        "gathered": 96,
        "gradients": 1024,
        "gradients_in_flight": 1024,
        "optimizer_state": 8192,
        "activations": 9000,
        "peak": 2**29,
    },
    "sent_bytes": {"pp": 1000, "dp": 800, "tp": 0},
    "idle_share": 0.1,
    "seconds": 2.0,
}
PLAN = {"devices": 4, "precision": "bf16-mixed", "recommendation": CHOSEN}


def run(folder: Path, plan: Any = PLAN, without: str = "", **of_records: Any) -> RunRecords:
    records = [one | of_records.get(one["kind"], {}) for one in whole_run()]
    found = read_run(write(folder, [one for one in records if one["kind"] != without]))
    found.plan = plan
    return found


def by_figure(found: RunRecords) -> dict[str, Deviation]:
    return {one.figure: one for one in deviations(found)}


def test_each_figure_stands_beside_its_plan(tmp_path: Path) -> None:
    rows = by_figure(run(tmp_path))
    assert {name: one.measured for name, one in rows.items()} == {
        "parameters": 4096,
        "gradients": 2048,
        "optimizer state": 8195,  # of rank 3, the fullest
        "peak": None,
        "sent along pp": 1000,
        "sent along dp": 1000,
        "pipeline's idle share": pytest.approx(0.125),  # (1.0 + 1.0 + 0.0 + 0.0) / 4 ranks / 4 s
        "a step": 4.0,
    }
    assert rows["parameters"].deviation == pytest.approx(96 / 4000)
    assert rows["gradients"].deviation == 0
    assert rows["sent along dp"].deviation == pytest.approx(0.25)
    assert rows["pipeline's idle share"].cells[1:] == ("10.0%", "12.5%", "+2.5 points")
    assert rows["a step"].deviation == pytest.approx(1.0)
    assert why_of_another_run(run(tmp_path)) == ""


def test_the_peak_of_a_device_is_compared_and_that_of_a_process_is_not(tmp_path: Path) -> None:
    assert "whole process" in by_figure(run(tmp_path / "host"))["peak"].obstacle
    found = run(tmp_path / "device", memory={"peak_of": "device"})
    assert by_figure(found)["peak"].deviation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fit", "said"), [({"in_process": True}, "take turns"), ({"device": "cuda"}, "NCCL")]
)
def test_an_idle_share_that_the_clock_cannot_see_is_not_compared(
    fit: dict[str, Any], said: str, tmp_path: Path
) -> None:
    row = by_figure(run(tmp_path, fit=fit))["pipeline's idle share"]
    assert row.measured is None
    assert said in row.obstacle


@pytest.mark.parametrize(
    ("without", "figure", "monitor"),
    [
        ("memory", "parameters", "MemoryMonitor"),
        ("memory", "peak", "MemoryMonitor"),
        ("traffic", "sent along dp", "TrafficMonitor"),
        ("step", "a step", "StepMonitor"),
        ("step", "pipeline's idle share", "StepMonitor"),
    ],
)
def test_a_figure_that_nobody_measured_names_who_would(
    without: str, figure: str, monitor: str, tmp_path: Path
) -> None:
    row = by_figure(run(tmp_path, without=without))[figure]
    assert row.measured is None
    assert row.deviation is None
    assert row.obstacle == f"needs {monitor}"


def test_traffic_that_was_not_planned_is_no_division_by_zero(tmp_path: Path) -> None:
    chosen = CHOSEN | {"sent_bytes": {"pp": 1000, "dp": 0}}
    row = by_figure(run(tmp_path, plan={"recommendation": chosen}))["sent along dp"]
    assert row.measured == 1000
    assert row.deviation is None
    assert row.cells[-1] == "not planned"


def test_a_run_that_is_not_the_planned_one_is_told_so(tmp_path: Path) -> None:
    plan = {**PLAN, "devices": 8, "recommendation": CHOSEN | {"dp": 4}}
    said = why_of_another_run(run(tmp_path, plan=plan))
    assert said == "The run is not the planned one: ranks 4, planned 8; dp 2, planned 4."


def test_the_page_has_the_rows(tmp_path: Path) -> None:
    text = page_of(run(tmp_path))
    for one in ("<td>sent along dp</td>", "<td>+25.0%</td>", "<td>+2.5 points</td>"):
        assert one in text
    assert (
        "Plan and run" in page_of(run(tmp_path, plan=None)).rsplit("No callback of this run", 1)[1]
    )
