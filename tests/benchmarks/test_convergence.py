"""The benchmark of convergence trains every method, and says how far each is from dense."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.benchmarks import convergence
from tests.benchmarks.convergence import METHODS, Run, draw, render, train
from tests.benchmarks.convergence_tasks import NoisyDigits

RUNS = [
    Run(task="digits", name=name, seed=seed, num_steps=20, losses=losses, sent_bytes=sent_bytes)
    for name, losses, sent_bytes in [
        ("dense", [2.0, 1.0], [100, 200]),
        ("int8", [2.0, 1.1], [100, 125]),
    ]
    for seed in range(2)
]


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


def test_no_digit_is_validated_twice() -> None:
    data = NoisyDigits()
    data.setup("fit")
    images, labels = data.val.tensors
    assert len(images) == len(labels) == 4 * 597
    assert len(data.val_dataloader()) % convergence.NUM_RANKS == 0
    assert len(torch.unique(images.flatten(1), dim=0)) == len(images)
