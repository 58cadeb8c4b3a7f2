"""One training run goes on from mesh to mesh, through one kind of file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch.utils.data import Subset

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, ZeRO3Strategy
from tests.strategies.parity import (
    GLOBAL_BATCH,
    Curve,
    GlobalBatches,
    build,
    ignoring,
    quiet_trainer,
)

pytestmark = ignoring(
    # Lightning's own loop does not see that the data module knows its place.
    "You're resuming from a checkpoint that ended before",
    ".*microbatches are fewer than the",
)

STEPS = 4  # on each mesh
RTOL = 1e-9  # in float64


def hybrid(**sizes: int) -> Callable[[], Any]:
    return lambda: HybridParallelStrategy(backend="in_process", num_microbatches=3, **sizes)


MESHES: dict[str, tuple[int, Callable[[], Any]]] = {
    "2x2x2": (8, hybrid(pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=2)),
    "zero3": (4, lambda: ZeRO3Strategy(backend="in_process")),
    "single device": (1, lambda: "auto"),
    "4 stages": (4, lambda: PipelineParallelStrategy(backend="in_process", num_microbatches=6)),
    "1x2x2": (4, hybrid(tensor_parallel_size=2, zero_stage=3)),
}


class PlacedBatches(GlobalBatches):
    """Batches that go on where the file was written, which Lightning's own loop would not do."""

    begin = 0  # global batch

    def state_dict(self) -> dict[str, int]:
        assert self.trainer is not None
        return {"begin": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]
        self.dataset = Subset(self.dataset, range(self.begin * GLOBAL_BATCH, len(self.dataset)))


def train_on(
    mesh: str, until: int, resume: Path | None, folder: Path, model_name: str
) -> tuple[list[float], Path]:
    """Go on to step `until`; return the losses of these steps and the file."""
    num_ranks, make = MESHES[mesh]
    model, curve = build(model_name).double(), Curve()
    trainer: L.Trainer = quiet_trainer(
        strategy=make(),
        devices=num_ranks,
        precision="64-true",
        max_steps=until,
        accumulate_grad_batches=1,
        callbacks=[curve],
    )
    trainer.fit(model, datamodule=PlacedBatches(model, 30), ckpt_path=resume)
    path = folder / f"{until}.ckpt"
    trainer.save_checkpoint(path)
    return curve.losses, path


def curve_over(
    meshes: list[str], folder: Path, model_name: str
) -> tuple[list[float], dict[str, Any]]:
    losses: list[float] = []
    path: Path | None = None
    for number, mesh in enumerate(meshes):
        more, path = train_on(mesh, (number + 1) * STEPS, path, folder, model_name)
        losses += more
    assert path is not None
    return losses, torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_curve_over_five_meshes(tmp_path: Path) -> None:
    meshes = list(MESHES)
    losses, saved = curve_over(meshes, tmp_path, "gpt_8")
    expected, path = train_on("single device", len(losses), None, tmp_path, "gpt_8")
    reference = torch.load(path, weights_only=True)
    assert len(losses) == len(meshes) * STEPS
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=RTOL, atol=0.0)
    for name, value in reference["state_dict"].items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_from_a_mesh_to_one_device_and_back(tmp_path: Path) -> None:
    losses, _ = curve_over(["2x2x2", "single device", "1x2x2"], tmp_path, "gpt")
    expected, _ = train_on("single device", len(losses), None, tmp_path, "gpt")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=RTOL, atol=0.0)
