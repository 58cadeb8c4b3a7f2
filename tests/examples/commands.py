"""Run the examples and the command line as their users do, inside this process or outside."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

REPOSITORY = Path(__file__).parents[2]
# Not ours to mend; the last is Lightning 2.6 with torch 2.13.
UPSTREAM_WARNINGS = (
    r"The .*dataloader.* does not have many workers",
    r"Using `DistributedSampler` with the dataloaders",
    r"The number of training batches",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",
)
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


def ignoring_advice(*messages: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests in which these warnings and upstream's advice are no errors."""
    return [pytest.mark.filterwarnings(f"ignore:{one}") for one in (*UPSTREAM_WARNINGS, *messages)]


def set_arguments(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Pretend that this process was started with `arguments`, the program's name first."""
    monkeypatch.setattr(sys, "argv", list(arguments))
    # Lightning 2.6 calls methods that jsonargparse 4.49 deprecated.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run `python examples/<name>.py <arguments>` inside this process, on CPUs."""
    path = str(REPOSITORY / "examples" / f"{name}.py")
    set_arguments(monkeypatch, path, "--trainer.accelerator=cpu", *QUIET, *arguments)
    runpy.run_path(path, run_name="__main__")


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `lightning-shard <arguments>` in the repository, each process with one thread."""
    command = str(Path(sys.executable).parent / "lightning-shard")
    outputs = [
        f"--trainer.default_root_dir={folder}",
        f"--trainer.logger.init_args.save_dir={folder}",
    ]
    return subprocess.run(
        [command, *arguments, *outputs, *QUIET],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(110),
        check=False,
    )


def last_losses(output: str) -> tuple[float, float]:
    """Read the validation losses of the GPT and of the bigram model that were printed last."""
    lines = [line for line in output.splitlines() if line.startswith("validation loss")]
    words = lines[-1].split()
    return float(words[2]), float(words[-1].rstrip(")"))


def largest_shares(output: str) -> list[str]:
    """Read the one table of held bytes: what the fullest rank holds of what replication would."""
    (row,) = [line for line in output.splitlines() if "most / replicated" in line]
    return [cell.strip() for cell in row.strip("│").split("│")][1:]
