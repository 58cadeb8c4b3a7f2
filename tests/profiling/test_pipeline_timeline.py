"""Timelines of a pipeline: what is taken, when, on whose clock, and what is written and printed."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_shard import PipelineParallelStrategy
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.schedules import Action, make_schedule
from lightning_shard.pipeline_parallel.simulation import Durations, replay
from lightning_shard.pipeline_parallel.timeline import Timeline
from lightning_shard.profiling import PipelineTimeline, pipeline_timeline
from lightning_shard.profiling.pipeline_timeline import ActionClock, IdleShares, render_idle_shares
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.parity import GlobalBatches, build, ignoring, quiet_trainer

pytestmark = ignoring()


class Observers(pl.Callback):
    """Records, batch by batch, whether the pipeline is observed, and what was logged."""

    def __init__(self) -> None:
        self.observed: list[bool] = []
        self.idle_shares: list[float] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self.observed.append(trainer.strategy.pipeline.observer is not None)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert trainer.strategy.pipeline.observer is None
        shares = trainer.callback_metrics
        if "pipeline_idle_share" in shares:
            self.idle_shares.append(shares["pipeline_idle_share"].item())


def fit(
    callback: PipelineTimeline,
    *others: pl.Callback,
    num_batches: int = 4,
    strategy: Any = None,
    devices: int = 2,
    **options: Any,
) -> None:
    if strategy is None:
        strategy = PipelineParallelStrategy(backend="in_process", **options)
    model = build("layers")
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        callbacks=[callback, *others],
        max_steps=num_batches,
        accumulate_grad_batches=1,
    )
    trainer.fit(model, datamodule=GlobalBatches(model))


def traced(path: Path) -> dict[int, list[tuple[str, float, float]]]:
    """Return of each rank what it did, and when it began and ended."""
    rows: dict[int, list[tuple[str, float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            rows.setdefault(event["pid"], []).append(span)
    return rows


def test_every_second_batch_has_its_files(tmp_path: Path) -> None:
    fit(PipelineTimeline(tmp_path / "new", every_n_steps=2))
    names = [f"batch_{number:06}.{kind}" for number in (2, 4) for kind in ("json", "png")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert (tmp_path / "new" / "batch_000002.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_first_batch_is_never_taken(tmp_path: Path) -> None:
    fit(PipelineTimeline(tmp_path, every_n_steps=1, formats=["json"]), num_batches=3)
    names = ["batch_000002.json", "batch_000003.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_trace_has_the_computations_in_order_and_the_waiting_between_them(
    schedule: str, tmp_path: Path
) -> None:
    fit(
        PipelineTimeline(tmp_path, every_n_steps=2, formats=["json"]),
        num_batches=2,
        schedule=schedule,
        num_microbatches=4,
    )
    table = make_schedule(schedule, num_ranks=2, num_microbatches=4)
    rows = traced(tmp_path / "batch_000002.json")
    for rank, expected in enumerate(table.actions):
        computed = [span for span in rows[rank] if "_" not in span[0]]
        assert [span[0] for span in computed] == [str(one) for one in expected if one.computes]
        all_spans = sorted(rows[rank], key=lambda span: span[1])
        ends = [end for _, _, end in all_spans]
        starts = [start for _, start, _ in all_spans]
        assert all(end <= start + 1e-3 for end, start in zip(ends, starts[1:], strict=False))
        received = {span[0] for span in rows[rank] if "RECV" in span[0]}
        assert received == {str(one) for one in expected if one.kind.startswith("RECV")}


def test_only_batches_that_are_taken_are_observed() -> None:
    seen: list[list[bool]] = []
    shares: list[list[float]] = []

    class Reporting(Observers):
        def on_train_end(self, *_: Any) -> None:
            seen.append(self.observed)
            shares.append(self.idle_shares)

    fit(PipelineTimeline(every_n_steps=2), Reporting())
    assert seen == [[False, True, False, True]] * 2
    assert shares[0] == shares[1]  # logged on each rank
    assert all(0 < share < 1 for share in shares[0])


def test_the_table_is_printed_once_with_a_row_for_each_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(PipelineTimeline(every_n_steps=2), num_microbatches=4)
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    assert output.count("median of 2 batches") == 1
    assert [row[0] for row in rows if len(row) == 4] == ["0", "1", "mean"]
    assert next(row for row in rows if row[:1] == ["mean"])[3] == "20.0%"  # (p - 1) / (m + p - 1)


def test_a_smaller_last_batch_is_compared_with_its_own_schedule() -> None:
    timeline = replay(make_schedule("1f1b", num_ranks=2, num_microbatches=3))
    shares = IdleShares.of(timeline, make_schedule("1f1b", num_ranks=2, num_microbatches=3))
    assert shares.theory == pytest.approx(1 / 4)
    assert shares.measured == pytest.approx(shares.replayed)


def test_uneven_stages_are_told_apart_from_messages() -> None:
    table = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    even = replay(table).durations
    uneven = {action: (1.0 + action.stage) * seconds for action, seconds in even.items()}
    shares = IdleShares.of(replay(table, uneven), table)
    assert shares.measured == shares.replayed
    assert shares.replayed[0] > 1 / 2  # its computations take half as long as the other's
    shares = IdleShares.of(replay(table, Durations(message=0.5)), table)
    assert shares.replayed == pytest.approx((shares.theory,) * 2)
    assert min(shares.measured) > shares.theory + 0.05


def test_the_table_holds_medians_over_batches() -> None:
    batches = [
        IdleShares((0.1, 0.2), (0.1, 0.1), 0.125),
        IdleShares((0.9, 0.2), (0.15, 0.1), 0.125),
        IdleShares((0.2, 0.2), (0.2, 0.1), 0.125),
    ]
    lines = [line.strip("│┃├┤ ") for line in render_idle_shares(batches).splitlines()]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert ["0", "20.0%", "15.0%"] in cells
    assert ["1", "20.0%", "10.0%"] in cells
    assert ["mean", "20.0%", "12.5%", "12.5%"] in cells


def _timeline_of_two_hosts(rank: int) -> Timeline:
    group = all_ranks()
    clock = ActionClock(group, torch.device("cpu"))
    with clock(Action(rank, "F", 0)):
        pass
    return clock.gather()


@pytest.mark.parametrize(("hosts", "is_aligned"), [("ab", True), ("aa", False)])
def test_the_clocks_of_two_hosts_are_aligned_and_that_of_one_is_taken_as_it_is(
    hosts: str, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 86400.0
    monkeypatch.setattr(pipeline_timeline.platform, "node", lambda: hosts[dist.get_rank()])
    monkeypatch.setattr(
        pipeline_timeline, "perf_counter", lambda: time.perf_counter() + day * dist.get_rank()
    )
    for timeline in run_ranks(_timeline_of_two_hosts, 2):
        (first,), (second,) = timeline.rows
        assert abs(second.start - first.start - (0 if is_aligned else day)) < day / 2


def test_a_run_without_a_taken_batch_says_why_there_is_no_table() -> None:
    with pytest.warns(UserWarning, match="every 50th batch but the first, and this run had 2"):
        fit(PipelineTimeline(), num_batches=2)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("zero1_in_process", 2), (None, 1)], ids=["zero1", "one rank"]
)
def test_a_strategy_without_a_pipeline_is_refused(strategy: str | None, devices: int) -> None:
    with pytest.raises(ConfigError, match="there is no pipeline"):
        fit(PipelineTimeline(), strategy=strategy, devices=devices)


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every_n_steps must be a whole number of at least 1"):
        PipelineTimeline(every_n_steps=0)
    with pytest.raises(ConfigError, match=r"each entry 'png' or 'json', .* got \['svg'\]"):
        PipelineTimeline(formats=["svg"])  # type: ignore[list-item]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-shard\[plots\]'"):
        PipelineTimeline(tmp_path)
    PipelineTimeline(tmp_path, formats=["json"])
