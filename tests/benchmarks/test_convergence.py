"""The benchmark of convergence trains every method, and says how far each is from dense."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.benchmarks.convergence import METHODS, draw, render, train

CURVES = {
    ("digits", "dense"): [(2.0, 1.0), (2.0, 1.0)],
    ("digits", "int8"): [(2.0, 1.1), (2.0, 1.1)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str) -> None:
    losses = train("digits", name, 0, 20)
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_a_method_stands_beside_dense(tmp_path: Path) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render("digits", CURVES))
    assert "+10.0%" in capture.get()
    draw(tmp_path / "curves.png", CURVES, 20)
    assert (tmp_path / "curves.png").stat().st_size > 0
