"""`lightning-shard replay`: configurations, exit codes, JSON, the debugger."""

import json
import pdb
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_shard.cli import main
from tests.examples.commands import REPOSITORY, ignoring_advice, run_command, set_arguments

pytestmark = ignoring_advice()
CONFIG = REPOSITORY / "configs" / "gpt_zero3.yaml"
MODEL = ("--model.num_layers=2", "--model.width=16", "--data.batch_size=4")


class Stumbling(pl.Callback):
    """Raises in the second step, on the last rank."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.strategy.mesh_rank) == (1, 1):
            raise ValueError("stumbled")


STUMBLING = {"class_path": f"{__name__}.{Stumbling.__name__}"}


class Command:
    """The command line, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, subcommand: str, *arguments: str) -> int:
        given = (subcommand, f"--config={CONFIG}", *MODEL, *arguments)
        set_arguments(self.monkeypatch, "lightning-shard", *given)
        return main()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(REPOSITORY)
    return Command(monkeypatch)


def _recording(folder: Path, backend: str, **options: Any) -> list[str]:
    """Return the arguments of a fit that is recorded into a folder."""
    recorder = {
        "class_path": "lightning_shard.replay.RecordSteps",
        "init_args": {"folder": str(folder), **options},
    }
    return [
        f"--trainer.strategy.init_args.backend={backend}",
        "--trainer.max_steps=3",
        f"--trainer.callbacks={json.dumps([STUMBLING, recorder])}",
    ]


@pytest.fixture
def step(command: Command, tmp_path: Path) -> str:
    """The folder of a recorded step."""
    with pytest.raises(ValueError, match="stumbled"):
        command(
            "fit",
            *_recording(tmp_path, "in_process"),
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.logger=false",
            "--trainer.enable_checkpointing=false",
            "--trainer.enable_progress_bar=false",
        )
    return str(tmp_path / "step-00000001")


@pytest.mark.slow
def test_a_failure_is_reproduced_and_looked_at(
    command: Command, step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stumbling = f"--trainer.callbacks={json.dumps([STUMBLING])}"
    capsys.readouterr()
    seen: list[str] = []
    monkeypatch.setattr(
        pdb,
        "post_mortem",
        lambda traceback: seen.extend(frame.f_code.co_name for frame in _frames(traceback)),
    )
    assert command("replay", step, stumbling, "--pdb") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step 1 of zero3 on 2 ranks: REPRODUCED, bit for bit")
    assert "rank 1: ValueError: stumbled" in printed
    assert seen[-1] == "on_before_optimizer_step"


def _frames(traceback: Any) -> list[Any]:
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def test_what_does_not_come_again_is_exit_code_1_and_json(
    command: Command, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert command("replay", step, "--trainer.callbacks=[]", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["replayed"]) == ("not reproduced", "no error")


def test_a_missing_record_is_one_line_and_exit_code_2(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("replay", str(tmp_path / "none")) == 2
    error = capsys.readouterr().err
    assert "lightning-shard: CheckpointError:" in error
    assert "Traceback" not in error


def test_one_rank_of_a_record_without_results_is_refused(
    command: Command, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("replay", step, "--trainer.callbacks=[]", "--rank=1") == 2
    assert "has no results of collectives, without which rank 1" in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_of_processes_is_taken_alone(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(CONFIG), *MODEL, *_recording(tmp_path, "gloo", results=True)]
    done = run_command(tmp_path, "fit", *arguments)
    step = tmp_path / "step-00000001"
    assert f"lightning-shard replay {step}" in done.stdout + done.stderr
    (step / "rank-00000.pt").unlink()
    capsys.readouterr()
    stumbling = f"--trainer.callbacks={json.dumps([STUMBLING])}"
    assert command("replay", str(step), stumbling, "--rank=1") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step 1 of zero3 on 2 ranks, rank 1 alone: REPRODUCED, bit for bit")
    assert "rank 1: ValueError: stumbled" in printed
