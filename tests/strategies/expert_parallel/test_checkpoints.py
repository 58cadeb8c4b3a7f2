"""One run goes on over other numbers of ranks that share experts: files have whole experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_shard import HybridParallelStrategy, ZeRO3Strategy
from tests.expert_parallel.models import EXPERT_MODELS
from tests.strategies.hybrid_parallel.test_checkpoints import PlacedBatches
from tests.strategies.parity import Curve, ignoring, quiet_trainer

pytestmark = ignoring(
    # Lightning's own loop does not see that the data module knows its place.
    "You're resuming from a checkpoint that ended before",
    ".*microbatches are fewer than the",
)

STEPS = 3  # on each layout
RTOL = {"listed": 1e-9, "seldom": 1e-9}  # in float64
RTOL_OF_HUGGING_FACE = 1e-6  # whose routers compute in float32


def sharing(**options: Any) -> Callable[..., Any]:
    return lambda **more: HybridParallelStrategy(backend="in_process", **options, **more)


LAYOUTS: dict[str, tuple[int, Callable[..., Any]]] = {
    "ep2-dp2-stage2": (4, sharing(expert_parallel_size=2, zero_stage=2)),
    "ep4-stage0": (4, sharing(expert_parallel_size=4, zero_stage=0)),
    "zero3": (2, lambda **more: ZeRO3Strategy(backend="in_process", **more)),
    "ep2-dp2-stage3": (4, sharing(expert_parallel_size=2, zero_stage=3)),
    "ep2-pp2": (4, sharing(expert_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2)),
    "ep2-tp2-stage2": (4, sharing(expert_parallel_size=2, tensor_parallel_size=2, zero_stage=2)),
    "single device": (1, lambda **_: "auto"),
    "ep2-stage1": (2, sharing(expert_parallel_size=2, zero_stage=1)),
}


def train_on(
    layout: str, until: int, resume: Path | None, path: Path, model_name: str, **options: Any
) -> list[float]:
    """Go on to step `until`, save, and return the losses of these steps."""
    num_ranks, make = LAYOUTS[layout]
    torch.manual_seed(7)
    model, curve = EXPERT_MODELS[model_name]().double(), Curve()
    for module in model.modules():  # torch multiplies groups of matrices in no float64
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    trainer: L.Trainer = quiet_trainer(
        strategy=make(**options),
        devices=num_ranks,
        precision="64-true",
        max_steps=until,
        accumulate_grad_batches=1,
        callbacks=[curve],
    )
    trainer.fit(model, datamodule=PlacedBatches(model, 30), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return curve.losses


def assert_one_curve(layouts: list[str], folder: Path, model: str, **options: Any) -> None:
    losses: list[float] = []
    path: Path | None = None
    for number, layout in enumerate(layouts):
        until, resume = (number + 1) * STEPS, path
        path = folder / f"{until}.ckpt"
        losses += train_on(layout, until, resume, path, model, **options)
    expected = train_on("single device", len(losses), None, folder / "expected.ckpt", model)
    assert len(losses) == len(layouts) * STEPS
    rtol = RTOL.get(model, RTOL_OF_HUGGING_FACE)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=0.0)
    assert path is not None
    if path.is_dir():
        return
    saved, reference = (
        torch.load(one, weights_only=True) for one in (path, folder / "expected.ckpt")
    )
    assert saved["state_dict"].keys() == reference["state_dict"].keys()
    for name, value in reference["state_dict"].items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=100 * rtol, atol=rtol)
    own, other = (one["optimizer_states"][0]["state"] for one in (saved, reference))
    assert own.keys() == other.keys()
    for number, state in other.items():
        torch.testing.assert_close(
            own[number]["exp_avg"], state["exp_avg"], rtol=100 * rtol, atol=rtol
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", ["listed", "mixtral"])
def test_full_files_have_whole_experts(model: str, tmp_path: Path) -> None:
    assert_one_curve(["ep2-dp2-stage2", "ep4-stage0", "ep2-stage1"], tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["listed", "mixtral"])
def test_folders_have_whole_experts(model: str, tmp_path: Path) -> None:
    layouts = ["ep2-dp2-stage3", "ep4-stage0", "zero3"]
    assert_one_curve(layouts, tmp_path, model, checkpoint_format="sharded")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@pytest.mark.parametrize("model", ["seldom", "deepseek_v3", "gpt_oss"])
def test_one_curve_over_all_layouts(model: str, checkpoint_format: str, tmp_path: Path) -> None:
    left_out = {"single device"} if checkpoint_format == "sharded" else set()
    left_out |= {"ep2-tp2-stage2"} if model == "seldom" else set()
    layouts = [one for one in LAYOUTS if one not in left_out]
    assert_one_curve(layouts, tmp_path, model, checkpoint_format=checkpoint_format)
