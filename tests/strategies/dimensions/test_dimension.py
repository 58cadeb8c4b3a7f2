"""Dimensions are objects that a strategy owns: one of the user's own goes in beside the others.

Steps run within the engine's, and what surrounds them is outermost.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_map

from lightning_shard import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.strategies.dimensions.dimension import (
    ModuleStep,
    ParallelDimension,
    PlainRunner,
    RunView,
    StepKind,
    StepRunner,
    WrappedRunner,
)
from lightning_shard.strategies.dimensions.pipeline import PipelineDimension
from lightning_shard.strategies.dimensions.stage_options import StageOptions
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.strategies.stacks import Stack, fit

pytestmark = [pytest.mark.filterwarnings(f"ignore:{one}") for one in UPSTREAM_WARNINGS]
NUM_SLICES = 2


class SlicedBatches(ParallelDimension):
    """Each rank computes its slice of the batch that all along the axis are given."""

    axis = "tp"
    averages_gradients = True

    def split(self, run: RunView) -> ModelSplit | None:
        group = run.groups[self.axis]
        self._own = slice(group.rank, None, group.size)
        return None

    def wrapped(self, runner: StepRunner) -> StepRunner:
        return SlicedSteps(runner, self._own)


class SlicedSteps(StepRunner):
    def __init__(self, inner: StepRunner, own: slice) -> None:
        self._inner, self._own = inner, own

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        batch = tree_map(lambda one: one[self._own], args[0])
        return self._inner.run(kind, step, (batch, *args[1:]), kwargs)


class Groups(Callback):
    """Notes on rank 0 which ranks are asked for what."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        rank = torch.tensor(float(strategy.mesh_rank))
        self.seen = {
            "samples": strategy.distributed_sampler_kwargs["num_replicas"],
            "gradients": strategy.gradient_groups.dp.size,
            "model": strategy.model_ranks,
            "gathered": strategy.all_gather(rank).tolist(),
            "mean": float(strategy.reduce(rank.clone())),
            "batches": len(strategy.engine.collectives.all_gather_object(None)),
        }


def fit_sliced(groups: Groups, others: Sequence[ParallelDimension], **options: Any) -> Any:
    class WithGroups(Stack):
        def callbacks(self) -> list[Callback]:
            return [groups]

    dimensions = [SlicedBatches(NUM_SLICES), *others]
    strategy = ModelParallelStrategy(dimensions, backend="in_process", num_ranks=4, **options)
    return fit(WithGroups, strategy, max_epochs=1)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("others", "zero_stage", "expected"),
    [
        pytest.param(
            [PipelineDimension(2, StageOptions(num_microbatches=3))],
            0,
            {"samples": 1, "gradients": 2, "model": (0, 1, 2, 3), "gathered": [0], "mean": 0}
            | {"batches": 2},
            id="beside a pipeline",
        ),
        pytest.param(
            [],
            2,
            {"samples": 2, "gradients": 4, "model": (0, 1), "gathered": [0, 2], "mean": 1}
            | {"batches": 4},
            id="beside data parallel",
        ),
    ],
)
def test_a_dimension_of_ones_own_trains_as_a_single_device_does(
    others: list[ParallelDimension], zero_stage: int, expected: dict[str, Any]
) -> None:
    groups = Groups()
    alone, sliced = fit(Stack, max_epochs=1), fit_sliced(groups, others, zero_stage=zero_stage)
    torch.testing.assert_close(sliced.curve.losses, alone.curve.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(sliced.weights, alone.weights, rtol=1e-5, atol=2e-7)
    assert groups.seen == expected


def test_no_scheme_derives_from_another() -> None:
    for kind in (TensorParallelStrategy, PipelineParallelStrategy, HybridParallelStrategy):
        assert kind.__bases__ == (ModelParallelStrategy,)
        own = [one for one in kind.__mro__ if one.__module__.startswith("lightning_shard.")]
        assert len(own) <= 7, own


def test_schemes_choose_their_dimensions() -> None:
    def sizes(strategy: ModelParallelStrategy) -> dict[str, int | None]:
        return {one.axis: one.size for one in strategy.dimensions}

    assert sizes(TensorParallelStrategy(backend="in_process")) == {"tp": None}
    pipeline = PipelineParallelStrategy(backend="in_process", pipeline_parallel_size=3)
    assert sizes(pipeline) == {"pp": 3}
    hybrid = HybridParallelStrategy(backend="in_process", tensor_parallel_size=2)
    assert list(sizes(hybrid).items()) == [
        ("tp", 2),
        ("ep", 1),
        ("cp", 1),
        ("pp", 1),
    ]  # in the order of splitting


class Told:
    """Notes what is entered and left."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.lines.append(f"enter {name}")
        yield
        self.lines.append(f"leave {name}")


@pytest.mark.parametrize(("kind", "apart"), [("training", ["own data"]), ("validation", [])])
def test_a_step_runs_within_the_engines(kind: StepKind, apart: list[str]) -> None:
    told = Told()
    plain = PlainRunner(lambda: told.inside("engine"), lambda: told.inside("own data"))
    runner = WrappedRunner(plain, lambda: told.inside("layers"), lambda result: result * 2)

    def step(*args: Any, **kwargs: Any) -> int:
        told.lines.append(f"{args} {kwargs}")
        return 21

    assert runner.run(kind, step, ("batch", 0), {"dataloader_idx": 1}) == 42
    around = ["layers", *apart, "engine"]
    assert told.lines == [
        *(f"enter {one}" for one in around),
        "('batch', 0) {'dataloader_idx': 1}",
        *(f"leave {one}" for one in reversed(around)),
    ]
