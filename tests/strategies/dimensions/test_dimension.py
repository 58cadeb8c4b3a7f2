"""Dimensions are objects that a strategy owns: one of the user's own goes in beside the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_shard.core import schemes
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.errors import ConfigError
from lightning_shard.fabric import registry as of_fabric
from lightning_shard.profiling import TrafficMonitor
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.dimensions.dimension import PlainRunner, StepKind
from tests.profiling.monitored import written
from tests.strategies.dimensions import rows
from tests.strategies.dimensions.rows import RowsParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import BATCH, NUM_BATCHES, Stack, fit, samples, trainer_of

pytestmark = ignoring()


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
            "model": strategy.run.groups.model_ranks,
            "gathered": strategy.all_gather(rank).tolist(),
            "mean": float(strategy.reduce(rank.clone())),
            "batches": len(strategy.engine.collectives.all_gather_object(None)),
        }


def sharing_rows(**options: Any) -> RowsParallelStrategy:
    return RowsParallelStrategy(
        backend="in_process", num_ranks=4, announce=False, rows_parallel_size=2, **options
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {"pipeline_parallel_size": 2, "num_microbatches": 3},
            {"samples": 1, "gradients": 2, "model": (0, 1, 2, 3), "gathered": [0], "mean": 0}
            | {"batches": 2},
            id="beside a pipeline",
        ),
        pytest.param(
            {"zero_stage": 2},
            {"samples": 2, "gradients": 4, "model": (0, 1), "gathered": [0, 2], "mean": 1}
            | {"batches": 4},
            id="beside data parallel",
        ),
    ],
)
def test_a_dimension_of_ones_own_trains_as_a_single_device_does(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    groups = Groups()
    alone = fit(Stack, max_epochs=1)
    shared = fit(Stack, sharing_rows(**options), [groups], max_epochs=1)
    torch.testing.assert_close(shared.curve.losses, alone.curve.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(shared.weights, alone.weights, rtol=1e-5, atol=2e-7)
    assert groups.seen == expected


def test_a_dimension_of_ones_own_has_an_axis_of_the_mesh() -> None:
    dimensions = {one.axis: one.size for one in sharing_rows().dimensions}
    assert dimensions == {"rows": 2, "tp": 1, "pp": 1}
    mesh = ParallelMesh.of_world(8, tp=2, others={"rows": 2})
    assert mesh.axes == ("pp", "dp", "rows", "tp")
    assert mesh.groups("rows") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert "2 replicas (dp) x 2 parts (rows) x 2 ranks to a layer (tp)" in str(mesh)
    assert "rows groups:                    0 2 | 1 3 | 4 6 | 5 7" in str(mesh)
    with pytest.raises(ConfigError, match=r"cannot be split into .* rows=3.* Sizes that fit: "):
        ParallelMesh.of_world(8, others={"rows": 3})


def test_a_dimension_of_ones_own_has_an_option_with_a_check_and_docs() -> None:
    with pytest.raises(ConfigError, match=r"^RowsParallelStrategy: rows_parallel_size must .* 0"):
        RowsParallelStrategy(rows_parallel_size=0)
    with pytest.raises(ConfigError, match="Did you mean 'rows_parallel_size'"):
        RowsParallelStrategy(row_parallel_size=2)  # type: ignore[call-arg]
    assert "rows_parallel_size: Ranks that share the rows" in (RowsParallelStrategy.__doc__ or "")


def test_a_dimension_of_ones_own_refuses_what_does_not_go_with_it() -> None:
    class Recurrent(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(1, 1)

    with pytest.raises(ConfigError, match="an RNN keeps its rows together"):
        fit(Recurrent, sharing_rows())


class Sent(Callback):
    """Counts what rank 0 has sent along the dimension's axis."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.mesh_rank == 0:
            self.sent = trainer.strategy.along("rows").traffic.total_bytes


@pytest.mark.slow
def test_a_dry_run_of_a_dimension_of_ones_own_says_what_is_sent(tmp_path: Path) -> None:
    batch = [one[:BATCH] for one in samples()]
    found = sharing_rows().dry_run(Stack(), batch, world_size=4)
    alone = sharing_rows().dry_run(Stack(), [one[: BATCH // 2] for one in batch], world_size=4)
    (rank,), (half,) = found.ranks, alone.ranks
    assert (found.batch_size, found.not_counted) == (2 * BATCH, ("rows of other ranks",))
    assert rank.memory.activations < 2 * half.memory.activations  # of its own rows
    assert "sent rows" in str(found)
    sent, monitor = Sent(), TrafficMonitor(tmp_path)
    fit(Stack, sharing_rows(), [sent, monitor], max_epochs=1)
    assert sent.sent == NUM_BATCHES * rank.sent["rows"] > 0
    (told,) = written(tmp_path, 0, "dry_run")
    assert told["ranks"][0]["sent"]["rows"] == rank.sent["rows"]
    assert written(tmp_path, 0, "fit")[0]["mesh"]["rows"] == 2


@pytest.fixture
def rows_are_a_scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the scheme in the list of names, and the names in Lightning's registries."""
    monkeypatch.setitem(schemes.SCHEMES, "rows_parallel", rows.ROWS_PARALLEL)
    registries: tuple[Any, ...] = (StrategyRegistry, STRATEGY_REGISTRY)
    before = [dict(one) for one in registries]
    schemes.register_strategies("lightning.pytorch", rows.__name__)
    of_fabric.register_strategies("lightning.fabric", rows.__name__)
    yield
    for one, content in zip(registries, before, strict=True):
        one.clear()
        one.update(content)


@pytest.mark.usefixtures("rows_are_a_scheme")
def test_a_scheme_of_ones_own_is_known_by_name_and_refused_under_fabric() -> None:
    strategy = trainer_of("rows_parallel_in_process").strategy
    assert isinstance(strategy, RowsParallelStrategy)
    with pytest.raises(ConfigError, match="same batches; under Fabric use 'zero2'"):
        Fabric(strategy="rows_parallel_in_process", accelerator="cpu")


def test_no_scheme_derives_from_another() -> None:
    for kind in (TensorParallelStrategy, PipelineParallelStrategy, HybridParallelStrategy):
        assert kind.__bases__ == (DataParallelStrategy,)
        own = [one for one in kind.__mro__ if one.__module__.startswith("lightning_shard.")]
        assert len(own) <= 3, own


def test_schemes_choose_their_dimensions() -> None:
    def sizes(strategy: DataParallelStrategy) -> dict[str, int | None]:
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
    runner = PlainRunner(lambda: told.inside("engine"), lambda: told.inside("own data"))

    def step(*args: Any, **kwargs: Any) -> int:
        told.lines.append(f"{args} {kwargs}")
        return 21

    assert runner.run(kind, step, ("batch", 0), {"dataloader_idx": 1}) == 21
    around = [*apart, "engine"]
    assert told.lines == [
        *(f"enter {one}" for one in around),
        "('batch', 0) {'dataloader_idx': 1}",
        *(f"leave {one}" for one in reversed(around)),
    ]
