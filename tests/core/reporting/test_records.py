"""What is read of a run's folder: whole lines, what survives, and what is refused."""

import json
from pathlib import Path

import pytest

from lightning_shard.core.reporting.records import RankFile, path_of, read_run
from lightning_shard.errors import ConfigError
from tests.core.reporting.runs import fit, step, whole_run, write, write_timeline


def test_what_a_rank_file_appends_is_read_again(tmp_path: Path) -> None:
    file = RankFile(tmp_path, 2)
    file.append("step", 7, loss=float("nan"), waiting={"dp": float("inf"), "pp": 0.5})
    file.close()
    file.append("end", 8)
    records = read_run(tmp_path).records
    assert [(one["kind"], one["step"], one["rank"]) for one in records] == [
        ("step", 7, 2),
        ("end", 8, 2),
    ]
    assert records[0]["loss"] is None
    assert records[0]["waiting"] == {"dp": None, "pp": 0.5}


def test_a_line_that_is_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, whole_run())
    path = path_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(tmp_path)
    assert run.num_unreadable == 1
    assert [one["rank"] for one in run.of("end")] == [0, 2, 3]


@pytest.mark.parametrize("line", ["[1, 2]", '{"kind": "step"}', "null", '"text"', "{}"])
def test_lines_of_others_are_no_records(line: str, tmp_path: Path) -> None:
    write(tmp_path, [fit(0)])
    with path_of(tmp_path, 0).open("a") as file:
        file.write(line + "\n")
    assert read_run(tmp_path).num_unreadable == 1


def test_steps_that_a_later_fit_takes_again_count_once(tmp_path: Path) -> None:
    first = [fit(0, world_size=1), *(step(0, n, loss=1.0) for n in range(1, 7))]
    resumed = [fit(0, world_size=1) | {"step": 4}, *(step(0, n, loss=2.0) for n in range(5, 8))]
    write(tmp_path, first + resumed)
    steps = read_run(tmp_path).of("step")
    assert [(one["step"], one["loss"]) for one in steps] == [
        *((n, 1.0) for n in range(1, 5)),
        *((n, 2.0) for n in range(5, 8)),
    ]


def test_ranks_that_the_last_fit_does_not_have_do_not_count(tmp_path: Path) -> None:
    again = [fit(rank, world_size=2) for rank in range(2)] + [step(r, 1) for r in range(2)]
    write(tmp_path, whole_run() + again)
    run = read_run(tmp_path)
    assert {one["rank"] for one in run.records} == {0, 1}
    assert len(run.of("step")) == 2


def test_what_a_lost_rank_did_behind_the_boundary_does_not_count(tmp_path: Path) -> None:
    before = [fit(rank, world_size=3) for rank in range(3)]
    before += [step(rank, n) for n in (1, 2, 3) for rank in range(3)]
    lost = {"kind": "generation", "step": 2, "number": 2, "members": ["a", "b"], "reason": "c died"}
    after = [{**lost, "rank": rank} for rank in range(2)]
    after += [step(rank, n) for n in (3, 4) for rank in range(2)]
    write(tmp_path, before + after)
    steps = [(one["step"], one["rank"]) for one in read_run(tmp_path).of("step")]
    assert (3, 2) not in steps
    assert steps.count((3, 0)) == 1
    assert (2, 2) in steps


def test_the_newest_timeline_is_read_also_from_a_folder_in_the_runs(tmp_path: Path) -> None:
    write(tmp_path, whole_run())
    write_timeline(tmp_path, "batch_000050")
    write_timeline(tmp_path / "timelines", "batch_000100")
    (tmp_path / "batch_000200.json").write_text('{"traceEvents": [{"ph"')  # half written
    run = read_run(tmp_path)
    assert run.timeline_name == "batch_000100.json"
    assert len(run.timeline) == 6
    assert run.timeline[1].start == 1.0
    assert run.timeline[1].seconds == pytest.approx(0.9)


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no monitor/rank_\*\.jsonl"):
        read_run(tmp_path)


def test_a_run_without_a_record_yet_is_refused(tmp_path: Path) -> None:
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_text('{"kind": "fi')
    with pytest.raises(ConfigError, match="no record that can be read"):
        read_run(tmp_path)


@pytest.mark.parametrize(("plan", "said"), [("{", "is no JSON"), ("[1]", "holds list")])
def test_a_plan_that_is_none_is_refused(plan: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, whole_run())
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(ConfigError, match=said):
        read_run(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"recommendation": None}))
    assert read_run(tmp_path).plan == {"recommendation": None}
