"""Runs' folders as callbacks write them, with figures that tests choose."""

import json
from pathlib import Path
from typing import Any

from lightning_shard.core.reporting.records import path_of


def fit(rank: int, **figures: Any) -> dict[str, Any]:
    pp, dp = divmod(rank, 2)
    return {
        "kind": "fit",
        "rank": rank,
        "step": 0,
        "strategy": "hybrid_parallel",
        "backend": "gloo",
        "in_process": False,
        "device": "cpu",
        "world_size": 4,
        "mesh": {"pp": 2, "dp": 2, "tp": 1},
        "coordinates": {"pp": pp, "dp": dp, "tp": 0},
        "data_rank": dp,
        "data_size": 2,
        "precision": "bf16-mixed",
        "accumulate": 1,
        "process": 40 + rank,
        "torch": "2.13.0",
        **figures,
    }


def step(rank: int, number: int, **figures: Any) -> dict[str, Any]:
    """Return a step in which the ranks of the second stage have more to do."""
    compute = 3.0 if rank >= 2 else 2.0
    return {
        "kind": "step",
        "rank": rank,
        "step": number,
        "seconds": 4.0,
        "loading": 0.25,
        "compute": compute,
        "optimizer": 0.5,
        "sending": 0.125,
        "waiting": {"dp": 0.125, "pp": 3.0 - compute},
        "num_batches": 1,
        "data_rank": rank % 2,
        "data_size": 2,
        "loss": 5.0 / number + 0.5 * (rank % 2),
        "samples": 8,
        "tokens": 1024,
        **figures,
    }


def traffic(rank: int, number: int, sent: int) -> dict[str, Any]:
    counted = {"calls": 4, "bytes": 2 * sent, "seconds": 0.5, "waited": 0.25}
    axes = {"dp": {"reduce_scatter": counted}, "pp": {"send": counted}}
    return {"kind": "traffic", "rank": rank, "step": number, "steps": 2, "batches": 2, "axes": axes}


def memory(rank: int, number: int) -> dict[str, Any]:
    held = {"parameters": 4096, "gathered": 0, "gradients": 2048, "optimizer_state": 8192 + rank}
    return {
        "kind": "memory",
        "rank": rank,
        "step": number,
        "held": held,
        "peak": 1 << 30,
        "peak_of": "process",
    }


def dry_run() -> dict[str, Any]:
    kinds = {"parameters": 4096, "gradients": 2048, "optimizer_state": 8192, "activations": 65536}
    ranks = [
        {"stages": [n], "memory": kinds, "sent": {"pp": 900, "dp": 1000, "tp": 0}, "idle_share": 0}
        for n in range(2)
    ]
    return {
        "kind": "dry_run",
        "rank": 0,
        "step": 0,
        "ranks": ranks,
        "not_counted": [],
        "every_step": True,
        "obstacle": None,
    }


def flops(peak: float | None = 1e6) -> dict[str, Any]:
    return {
        "kind": "flops",
        "rank": 0,
        "step": 0,
        "per": {"tokens": 1000.0},
        "machine": "h100" if peak else None,
        "peak": peak,
        "obstacle": None,
    }


def whole_run(num_steps: int = 5) -> list[dict[str, Any]]:
    """Return the records of four ranks, in the order of time."""
    found = [fit(rank) for rank in range(4)] + [flops(), dry_run()]
    for number in range(1, num_steps + 1):
        found += [step(rank, number) for rank in range(4)]
        if number % 2 == 0:
            found += [traffic(rank, number, sent=1000) for rank in range(4)]
            found += [memory(rank, number) for rank in range(4)]
    found.append({"kind": "metrics", "rank": 0, "step": num_steps, "values": {"val_loss": 0.75}})
    return [*found, *({"kind": "end", "rank": rank, "step": num_steps} for rank in range(4))]


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Write records, a second after the other, and return the run's folder."""
    for second, one in enumerate(records):
        path = path_of(folder, one["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"time": 1_790_000_000.0 + second, **one}) + "\n")
    return folder


def write_timeline(folder: Path, name: str = "batch_000050") -> None:
    """Write what `PipelineTimeline` writes."""
    events = [
        {"ph": "X", "name": f"{rank}F{n}", "cat": "forward", "pid": rank, "ts": 1e6 * n, "dur": 9e5}
        for rank in range(2)
        for n in range(3)
    ]
    events.append({"ph": "M", "name": "process_name", "pid": 0})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"traceEvents": events}))
