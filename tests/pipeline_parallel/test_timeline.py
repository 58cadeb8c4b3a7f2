"""Timelines, measured or simulated, and their pictures."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.schedules import Action, make_schedule
from lightning_shard.pipeline_parallel.simulation import Durations, replay
from lightning_shard.pipeline_parallel.timeline import (
    Event,
    Timeline,
    chrome_trace,
    draw_text,
    save_chrome_trace,
    save_png,
)

F0, B0 = Action(0, "F", 0), Action(0, "B", 0)
MEASURED = (  # rank, action, start, end: as they may come, in no order
    (1, Action(1, "B", 0), 13.0, 15.0),
    (0, B0, 16.0, 18.0),
    (0, F0, 10.0, 11.0),
    (0, Action(0, "SEND_F", 0), 11.0, 12.0),
    (1, Action(1, "F", 0), 12.0, 13.0),
    (0, Action(0, "RECV_B", 0), 15.0, 15.5),
)


@pytest.fixture
def measured() -> Timeline:
    return timeline_of(MEASURED, 2)


def timeline_of(events: Iterable[tuple[int, Action, float, float]], num_ranks: int) -> Timeline:
    """Sort measured events, each (rank, action, start, end), into a timeline."""
    rows: list[list[Event]] = [[] for _ in range(num_ranks)]
    for rank, action, start, end in events:
        rows[rank].append(Event(action, start, end))
    return Timeline.of_rows(rows)


def test_measured_events_are_sorted_by_rank_and_start(measured: Timeline) -> None:
    rows = [[str(event.action) for event in row] for row in measured.rows]
    assert rows == [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1F0", "1B0"]]


def test_a_rank_is_idle_when_it_does_not_compute_and_messages_are_not_computing(
    measured: Timeline,
) -> None:
    assert (measured.start, measured.duration) == (10.0, 8.0)
    assert measured.idle_shares == (1 - 3 / 8, 1 - 3 / 8)
    assert measured.idle_share == 1 - 3 / 8


def test_a_timeline_without_events_is_not_idle() -> None:
    empty = timeline_of((), 2)
    assert (empty.duration, empty.idle_shares) == (0.0, (0.0, 0.0))
    assert empty.peak_activations == (0, 0)
    assert draw_text(empty, width=3) == "rank 0   ...  0% idle\nrank 1   ...  0% idle"


def test_activations_live_until_the_backward_of_the_weights() -> None:
    kinds = ("F", "F", "I", "F", "W", "I", "W", "I", "W")
    microbatches = (0, 1, 0, 2, 0, 1, 1, 2, 2)
    events = [
        (0, Action(0, kind, i), float(slot), slot + 1.0)
        for slot, (kind, i) in enumerate(zip(kinds, microbatches, strict=True))
    ]
    assert timeline_of(events, 1).peak_activations == (3,)


def test_text_of_one_stage_per_rank(measured: Timeline) -> None:
    assert draw_text(measured, width=24) == (
        "rank 0   F0-...............B0----  62% idle\nrank 1   ......F0-B0----.........  62% idle"
    )


def test_text_of_several_stages_says_which() -> None:
    schedule = make_schedule("looped_bfs", num_ranks=2, num_microbatches=2)
    assert draw_text(replay(schedule), width=60).splitlines() == [
        "rank 0   0F0-0F1-2F0-2F1-............2B1-----2B0-----0B1-----0B0-----  20% idle",
        "rank 1   ....1F0-1F1-3F0-3F1-3B1-----3B0-----1B1-----1B0-----........  20% idle",
    ]


def test_labels_without_room_are_cut(measured: Timeline) -> None:
    assert draw_text(measured, width=8).splitlines()[0] == "rank 0   F.....B0  62% idle"


def test_a_png_is_written(measured: Timeline, tmp_path: Path) -> None:
    save_png(measured, tmp_path / "pipeline.png", title="measured")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_the_error_says_what_to_install(
    measured: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"cannot be drawn: .*lightning-shard\[plots\]'"):
        save_png(measured, tmp_path / "pipeline.png")
    assert not (tmp_path / "pipeline.png").exists()


def test_a_chrome_trace_has_a_process_per_rank_and_messages_apart(measured: Timeline) -> None:
    events = chrome_trace(measured)["traceEvents"]
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert names == {
        (0, 0, "process_name"): "rank 0",
        (0, 0, "thread_name"): "computations",
        (0, 1, "thread_name"): "messages",
        (1, 0, "process_name"): "rank 1",
        (1, 0, "thread_name"): "computations",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, 0, "0F0", 0.0, 1e6),
        (0, 1, "0SEND_F0", 1e6, 1e6),
        (0, 1, "0RECV_B0", 5e6, 0.5e6),
        (0, 0, "0B0", 6e6, 2e6),
        (1, 0, "1F0", 2e6, 1e6),
        (1, 0, "1B0", 3e6, 2e6),
    ]
    assert spans[1]["cat"] == "message"
    assert spans[0]["args"] == {"stage": 0, "microbatch": 0}


def test_a_saved_chrome_trace_is_json(tmp_path: Path) -> None:
    schedule = make_schedule("zbv", num_ranks=2, num_microbatches=4)
    timeline = replay(schedule, Durations(message=0.5))
    save_chrome_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(timeline)


def test_every_kind_has_a_category_and_a_colour() -> None:
    timeline = replay(
        make_schedule("dual_pipe_v", num_ranks=2, num_microbatches=4), Durations(message=0.5)
    )
    spans = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {
        "forward",
        "backward",
        "backward of inputs",
        "backward of weights",
        "message",
    }
    assert len({event["cname"] for event in spans}) == 6
