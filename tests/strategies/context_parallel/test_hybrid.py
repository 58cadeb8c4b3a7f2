"""Sequences in parts beside layers in parts and stages, and from one such mesh to another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import ContextParallelStrategy, HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from lightning_shard.errors import ConfigError
from tests.strategies.hybrid_parallel import test_checkpoints as over_meshes
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    ignoring,
    single_device,
    train,
)

pytestmark = ignoring()

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "cp2-tp2": (4, {"tensor_parallel_size": 2}),
    "cp2-pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "cp2-tp2-dp2-stage3": (8, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "cp2-pp2-tp2": (
        8,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
    ),
    "cp2-pp2-dp2-stage2": (
        8,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2},
    ),
    "cp2-pp2-zbv-recomputed": (
        4,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "gpipe"}
        | {"activation_checkpointing": "full"},
    ),
    "one sequence a rank": (
        4,
        {"context_parallel_size": 1, "tensor_parallel_size": 2, "zero_stage": 1},
    ),
    "copies of the state": (8, {"data_parallel_size": (2, 2), "zero_stage": 3}),
    "a copy for each sequence": (8, {"data_parallel_size": (4, 1), "zero_stage": 2}),
    "copies, cp-slowest": (
        8,
        {"data_parallel_size": (2, -1), "zero_stage": 3, "axis_order": ("cp", "pp", "dp", "tp")},
    ),
    "cp-slowest": (4, {"tensor_parallel_size": 2, "axis_order": ("cp", "pp", "dp", "tp")}),
}
QUICK = {
    ("llama", "cp2-tp2"),
    ("gpt", "cp2-pp2"),
    ("encoder", "cp-slowest"),
    ("gpt", "one sequence a rank"),
    ("gpt", "copies of the state"),
}


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=() if (model, layout) in QUICK else pytest.mark.slow)
        for model in ("gpt", "llama", "gpt2", "encoder", "bert", "nanogpt")
        for layout in LAYOUTS
    ],
)
def test_equals_a_single_device(model: str, layout: str) -> None:
    num_ranks, options = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        **({"zero_stage": 0, "context_parallel_size": 2} | options), backend="in_process"
    )
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    run = train(build(model), strategy=strategy, devices=num_ranks)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("pair", "num_shards"), [((2, 2), 4), ((1, 4), 8), ((4, 1), 2), ((-1, 2), 4), ((4, -1), 2)]
)
def test_pairs_of_copies_and_shards_are_accepted_beside_parts_of_sequences(
    pair: tuple[int, int], num_shards: int
) -> None:
    """One check counted ranks of other samples, and the other all that average gradients."""
    strategy = HybridParallelStrategy(
        backend="in_process", context_parallel_size=2, data_parallel_size=pair, zero_stage=3
    )
    train(build("gpt"), strategy=strategy, devices=8, max_steps=1)
    assert (strategy.mesh.dp, strategy.shard_size) == (4, num_shards)


@pytest.mark.parametrize("pair", [(2, 4), (8, 1), (1, 8), (3, -1)])
def test_pairs_are_of_the_ranks_of_other_samples(pair: tuple[int, int]) -> None:
    strategy = HybridParallelStrategy(
        backend="in_process", context_parallel_size=2, data_parallel_size=pair, zero_stage=3
    )
    with pytest.raises(ConfigError, match=r"4 data-parallel ranks of this run\. Pairs .*\(2, 2\)"):
        train(build("gpt"), strategy=strategy, devices=8, max_steps=1)


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


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
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
