"""On two processes over Gloo: the Trainer's losses, and a script that `fabric.launch()` runs."""

import os
from pathlib import Path

import pytest

from tests.fabric.loops import NUM_STEPS, Run, assert_same, run_of, strategy_of
from tests.processes import check, run_alone, run_processes
from tests.strategies.parity import (
    STRATEGIES,
    UPSTREAM_WARNINGS,
    Case,
    ignore_upstream_warnings,
    train_ranks,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]


def both(strategies: list[str], num_steps: int = NUM_STEPS) -> list[tuple[Run, Run]]:
    """Train by hand and under a Trainer, one stage after the other; for `run_processes`."""
    ignore_upstream_warnings()
    return [
        (run_of(strategy_of(one, "gloo"), "gpt", num_steps), under_trainer(one, num_steps))
        for one in strategies
    ]


def under_trainer(strategy: str, num_steps: int) -> Run:
    case = Case(model="gpt", strategy=strategy, num_ranks=2, num_steps=num_steps)
    return train_ranks(case, "gloo")


def test_a_few_steps_equal_the_trainers() -> None:
    for [(run, expected)] in run_processes(both, 2, strategies=["zero3"], num_steps=3):
        assert_same(run, expected)


@pytest.mark.slow
def test_20_steps_equal_the_trainers_under_every_stage() -> None:
    for runs in run_processes(both, 2, strategies=list(STRATEGIES)):
        for run, expected in runs:
            assert_same(run, expected)


SCRIPT = """
import sys

import torch
from lightning.fabric import Fabric

import lightning_shard

fabric = Fabric(strategy="zero3", accelerator="cpu", devices=2)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
for step in range(3):
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1:] == ["fail"] and fabric.global_rank == 1:
    raise ValueError("of rank 1")
fabric.barrier()
fabric.save("saved", {"model": model, "optimizer": optimizer})
fabric.print(f"done on {fabric.world_size} ranks")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        monkeypatch.delenv(name)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace('"saved"', repr(str(tmp_path / "saved"))))
    return path


@pytest.mark.slow
def test_a_script_launches_its_ranks(script: Path) -> None:
    finished = run_alone(str(script))
    check([finished])
    assert finished.output.count("done on 2 ranks") == 1
    assert (script.parent / "saved").is_file()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_script(script: Path) -> None:
    finished = run_alone(str(script), "fail")
    assert finished.returncode != 0
    assert "of rank 1" in finished.output
