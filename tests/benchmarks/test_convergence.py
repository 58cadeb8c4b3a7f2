"""The benchmark of convergence trains every method, and says how far each is from dense."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.benchmarks import convergence
from tests.benchmarks.convergence import METHODS, Run, draw, kept, render, train, train_all
from tests.benchmarks.convergence_tasks import NoisyDigits

RUNS = [
    Run(task="digits", name=name, seed=seed, num_steps=20, losses=losses, sent_bytes=sent_bytes)
    for name, losses, sent_bytes in [
        ("dense", [2.0, 1.0], [100, 200]),
        ("int8", [2.0, 1.1], [100, 125]),
    ]
    for seed in range(2)
]


class AtOnce:
    """In place of a pool of processes."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        job: Future[Any] = Future()
        job.set_result(function(*arguments))
        return job


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str) -> None:
    run = train(Run(task="digits", name=name, seed=0, num_steps=20))
    assert len(run.losses) == len(run.sent_bytes) == 10
    assert run.losses[-1] < run.losses[0]
    assert 0 < run.sent_bytes[0] < run.sent_bytes[-1]


def test_a_method_stands_beside_dense(tmp_path: Path) -> None:
    console = Console(width=110)
    with console.capture() as capture:
        console.print(render("digits", RUNS))
    (row,) = [line for line in capture.get().splitlines() if "int8" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "int8",
        "1.1000",
        "+10.0%",
        "<= 1%",
        "62.5%",
        "25.0%",
        "0.0",
        "1.1000 1.1000",
    ]
    draw(tmp_path / "curves.png", RUNS)
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_what_is_kept_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.jsonl"
    monkeypatch.setattr(convergence, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(convergence, "train", lambda run: next(r for r in RUNS if r.key == run.key))
    assert train_all(RUNS[:3], file) == RUNS[:3]
    assert kept(file) == {run.key: run for run in RUNS[:3]}
    monkeypatch.setattr(convergence, "train", lambda run: RUNS[3])
    assert train_all(RUNS, file) == RUNS


def test_no_digit_is_validated_twice() -> None:
    data = NoisyDigits()
    data.setup("fit")
    images, labels = data.val.tensors
    assert len(images) == len(labels) == 4 * 597
    assert len(data.val_dataloader()) % convergence.NUM_RANKS == 0
    assert len(torch.unique(images.flatten(1), dim=0)) == len(images)
