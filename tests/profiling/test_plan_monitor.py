"""A plan lies with its run, and the end of a fit says how far off it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import lightning_shard
from lightning_shard import AutoStrategy, ConfigError
from lightning_shard.core.reporting.page import page_of
from lightning_shard.core.reporting.records import read_run
from lightning_shard.planning.search import plan
from lightning_shard.profiling import MemoryMonitor, PlanMonitor
from tests.elastic.runs import fit as fit_elastic
from tests.profiling.monitored import fit, monitors
from tests.strategies.parity import GLOBAL_BATCH, build, ignoring

pytestmark = ignoring()


def watched(folder: Path, given: Any = None) -> list[Any]:
    return [*monitors(folder), PlanMonitor(given, folder)]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    told = json.loads((folder / "plan_deviation.json").read_text())
    assert told["besides"] == ""
    return {one["figure"]: one for one in told["rows"]}


def is_held(rows: dict[str, dict[str, Any]]) -> None:
    """Memory that stays is that of the plan to 1 %, and traffic but for flags and logged values."""
    for kind in ("parameters", "gradients", "optimizer state"):
        assert abs(rows[kind]["deviation"]) < 0.01, rows[kind]
    sent = [one for name, one in rows.items() if name.startswith("sent along")]
    assert sent
    for one in sent:
        assert abs(one["deviation"]) < 0.05, one


@pytest.mark.slow
def test_shard_auto_is_held_to_account(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    strategy = AutoStrategy(backend="in_process", choice_file=None)
    fit("gpt", watched(tmp_path), strategy=strategy, devices=2)
    assert read_run(tmp_path).plan == strategy.prediction  # type: ignore[attr-defined]
    is_held(rows_of(tmp_path))
    assert "The plan and the run" in caplog.text
    assert "sent along dp" in caplog.text
    assert "optimizer state" in page_of(read_run(tmp_path)).split('id="plan"')[1]


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_plan_of_the_users_is_held_to_account(as_file: bool, tmp_path: Path) -> None:
    model = build("gpt")
    batch = default_collate([model.data(2)[n] for n in range(2)])
    sizes = {"devices": 2, "global_batch": GLOBAL_BATCH, "batch_size": GLOBAL_BATCH // 2}
    given: Any = plan(
        model, batch, **sizes, machine="cpu", precision="32-true", checkpointing=[None]
    )
    if as_file:
        (tmp_path / "given.json").write_text(given.to_json())
        given = tmp_path / "given.json"
    chosen = json.loads(given.read_text()) if as_file else given.to_dict()
    row = chosen["recommendation"]
    assert row["strategy"] == "zero1"
    strategy = lightning_shard.ZeRO1Strategy(backend="in_process", **row["options"])
    fit("gpt", watched(tmp_path / "run", given), strategy=strategy, devices=2)
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == chosen
    is_held(rows_of(tmp_path / "run"))


@pytest.mark.slow
def test_it_changes_no_bit(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], watched(tmp_path)):
        strategy = AutoStrategy(backend="in_process", choice_file=None)
        runs.append(fit("gpt", callbacks, strategy=strategy, devices=2))
    assert runs[0].losses == runs[1].losses
    for name, weight in runs[0].weights.items():
        assert torch.equal(runs[1].weights[name], weight), name


def test_a_run_without_a_plan_is_refused_before_its_first_step(tmp_path: Path) -> None:
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process")
    with pytest.raises(ConfigError, match="no plan of this run, expected one with ZeRO2Strategy"):
        fit("lstm", [MemoryMonitor(tmp_path), PlanMonitor()], strategy=strategy, devices=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "recommends nothing"),
        ('{"recommendation": null}', "recommends nothing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        PlanMonitor(tmp_path / "plan.json")


def test_an_elastic_fit_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a fixed number of ranks"):
        fit_elastic(trainer_options={"callbacks": [PlanMonitor(folder=tmp_path)]})
