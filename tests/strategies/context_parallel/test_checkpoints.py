"""One training run goes on among meshes with and without sequences in parts, in either format."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import ContextParallelStrategy, HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from tests.strategies.hybrid_parallel import test_checkpoints as over_meshes
from tests.strategies.parity import ignoring

pytestmark = ignoring("You're resuming from a checkpoint that ended before")
IN_PROCESS: dict[str, Any] = {"backend": "in_process"}
SHARDED = IN_PROCESS | {"checkpoint_format": "sharded"}

MESHES: dict[str, Any] = {  # ranks, and what makes the strategy
    "cp2": (2, lambda: ContextParallelStrategy(**IN_PROCESS, zero_stage=1)),
    "cp4, sharded": (4, lambda: ContextParallelStrategy(**SHARDED, zero_stage=3)),
    "cp2 x tp2, sharded": (
        4,
        lambda: HybridParallelStrategy(
            **SHARDED, context_parallel_size=2, tensor_parallel_size=2, zero_stage=2
        ),
    ),
    "cp2 x dp2, sharded": (
        4,
        lambda: ContextParallelStrategy(**SHARDED, context_parallel_size=2, zero_stage=2),
    ),
    "tp2": (2, lambda: TensorParallelStrategy(**IN_PROCESS)),
    "single device": (1, lambda: "auto"),
}


@pytest.mark.parametrize(
    "meshes",
    [
        ["cp2", "cp4, sharded", "single device"],
        pytest.param(["cp2", "tp2", "cp4, sharded"], marks=pytest.mark.slow),
        pytest.param(
            ["cp4, sharded", "cp2 x tp2, sharded", "tp2", "cp2 x dp2, sharded"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" to ".join,
)
def test_one_curve_over_meshes(
    meshes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_meshes, "MESHES", MESHES)
    losses: list[float] = []
    path: Path | None = None
    for number, mesh in enumerate(meshes):
        if mesh == "single device" and path is not None and path.is_dir():
            path = consolidated(path)
        until = (number + 1) * over_meshes.STEPS
        more, path = over_meshes.train_on(mesh, until, path, tmp_path, "gpt")
        losses += more
    expected, _ = over_meshes.train_on("single device", len(losses), None, tmp_path, "gpt")
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected), rtol=over_meshes.RTOL, atol=0.0
    )


def consolidated(folder: Path) -> Path:
    """Return a full file of a sharded folder, which Lightning's own strategies read."""
    path = folder.with_suffix(".full.ckpt")
    consolidate(folder, path)
    return path
