"""Folders of the sharded format that are kept: each later version has to read them.

    python -m tests.checkpoint.sharded.kept_folders FOLDER     writes FOLDER/<layout>.ckpt

Written once for a format, and never again.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.checkpoint import kept_runs
from tests.checkpoint.sharded.runs import LAYOUTS, SAVED_AFTER, fit, saving

KEPT_LAYOUTS = ("zero3-3", "tensor-4", "pipeline-2")
KEPT_RUNS = ("shard_ddp_topk", "diloco")  # whose ranks keep something for themselves


def strategy_of(run: str) -> Any:
    """Return the strategy of a kept run, which saves folders."""
    strategy = kept_runs.RUNS[run]()
    strategy.checkpoint_format = "sharded"
    return strategy


def write(folder: Path) -> None:
    """Write a folder of each layout, and the losses of a single device after it."""
    folder.mkdir(parents=True, exist_ok=True)
    for layout in KEPT_LAYOUTS:
        with TemporaryDirectory() as scratch:
            path = saving(LAYOUTS[layout](checkpoint_format="sharded"), Path(scratch))
            shutil.copytree(path, folder / f"{layout}.ckpt")
    losses = fit("auto").losses[SAVED_AFTER:]
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")
    write_runs(folder)


def write_runs(folder: Path) -> None:
    """Write a folder of each run, and its losses after it."""
    losses = {}
    for run in KEPT_RUNS:
        with TemporaryDirectory() as scratch:
            kept_runs.fit(strategy_of(run), Path(scratch))
            kept = folder / f"{run}.ckpt"
            shutil.copytree(Path(scratch, f"step={kept_runs.SAVED_AFTER}.ckpt"), kept)
            losses[run] = kept_runs.fit(strategy_of(run), Path(scratch, "on"), resume=kept).losses
    (folder / "losses_of_runs.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
