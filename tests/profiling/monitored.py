"""Fits with all monitors, and what they have written."""

import json
from pathlib import Path
from typing import Any

from lightning_shard.core.reporting.records import path_of
from lightning_shard.profiling import MemoryMonitor, StepMonitor, TrafficMonitor
from lightning_shard.profiling.run_monitor import RunMonitor
from tests.strategies.parity import Curve, Run, build, train


def monitors(folder: Path, machine: str | None = None, **of_steps: Any) -> list[RunMonitor]:
    return [
        StepMonitor(folder, machine, **of_steps),
        TrafficMonitor(folder, every_n_steps=2),
        MemoryMonitor(folder, every_n_steps=2),
    ]


def fit(model: str, callbacks: list[Any], **options: Any) -> Run:
    """Train a model of the parity tests, without accumulation unless asked for."""
    options = {"num_steps": 4, "accumulate_grad_batches": 1} | options
    return train(build(model), callbacks=[Curve(), *callbacks], **options)


def written(folder: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind in a rank's file."""
    lines = path_of(folder, rank).read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]
