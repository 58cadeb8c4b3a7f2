"""Three dimensions of parallelism train as a single device does."""

import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from lightning_shard import HybridParallelStrategy
from lightning_shard.errors import ConfigError
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.parity import (
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignore_upstream_warnings,
    ignoring,
    single_device,
    train,
)

pytestmark = ignoring()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: the sizes of the mesh, and how its ranks work."""

    model: str
    sizes: tuple[int, int, int]  # pp, tp, dp
    zero_stage: int
    schedule: str = "1f1b"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        return f"{self.model}-{sizes}-stage{self.zero_stage}-{self.schedule}"

    @property
    def precision(self) -> str:
        """Llama has an embedded weight with a gradient near zero, by which AdamW divides."""
        return "64-true" if self.model.startswith("llama") else "32-true"

    @property
    def num_ranks(self) -> int:
        pp, tp, dp = self.sizes
        return pp * tp * dp


def train_layout(layout: Layout, backend: str = "in_process") -> Run:
    """Train as a layout says; on real processes each must call."""
    ignore_upstream_warnings()
    pp, tp, dp = layout.sizes
    strategy = HybridParallelStrategy(
        backend=backend,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        zero_stage=layout.zero_stage,
        schedule=layout.schedule,
        num_microbatches=6 // dp,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*microbatches are fewer than the .* stages")
        return train(
            build(layout.model),
            strategy=strategy,
            devices=layout.num_ranks,
            precision=layout.precision,
        )


def assert_single_device(run: Run, layout: Layout) -> None:
    case = Case(model=layout.model, strategy="", num_ranks=1, precision=layout.precision)
    assert_parity(run, single_device(case))


QUICK = {
    Layout(model="gpt", sizes=(2, 2, 1), zero_stage=1),
    Layout(model="gpt", sizes=(2, 1, 2), zero_stage=3, schedule="gpipe"),
}
FULL = [
    Layout(model=model, sizes=sizes, zero_stage=stage, schedule=schedule)
    for model, sizes, stage, schedule in product(
        ("gpt", "llama_8"),
        ((2, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2), (3, 2, 2)),
        range(4),
        ("1f1b", "gpipe"),
    )
    if schedule == "1f1b" or sizes[0] > 1
]


@pytest.mark.few_cases(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, marks=() if one in QUICK else pytest.mark.slow, id=str(one))
        for one in FULL
    ],
)
def test_parity(layout: Layout) -> None:
    assert_single_device(train_layout(layout), layout)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits() -> None:
    layout = Layout(model="gpt", sizes=(2, 2, 2), zero_stage=2)
    assert_bitwise_equal(train_layout(layout), train_layout(layout))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_that_interleave_are_split_too() -> None:
    layout = Layout(model="llama_8", sizes=(2, 2, 1), zero_stage=1, schedule="interleaved_1f1b")
    assert_single_device(train_layout(layout), layout)


GLOO = Layout(model="gpt", sizes=(2, 2, 1), zero_stage=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_gloo_processes() -> None:
    for run in run_processes(train_layout, 4, timeout_seconds=500, layout=GLOO, backend="gloo"):
        assert_single_device(run, GLOO)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_four_mpi_ranks() -> None:
    for run in run_mpi(train_layout, 4, timeout_seconds=500, layout=GLOO, backend="mpi"):
        assert_single_device(run, GLOO)


def strategy_of(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(backend="in_process", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 3}, "4 ranks cannot be split .*pp=3"),
        ({"tensor_parallel_size": 8}, "4 ranks cannot be split .*tp=8"),
        ({"data_parallel_size": 3}, "4 ranks cannot be split .*dp=3"),
        ({"data_parallel_size": 0}, "data_parallel_size must be .* at least 1 or -1"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be .* at least 1, or -1"),
        ({"axis_order": ("pp", "dp", "dp")}, "axis_order"),
        ({"zero_stage": 4}, "zero_stage must be a whole number from 0 to 3"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(build("gpt"), strategy=strategy_of(**options), devices=4)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": None},
        {"pipeline_parallel_size": "2"},
        {"tensor_parallel_size": 2.5},
        {"data_parallel_size": "2"},
        {"data_parallel_size": (2, None)},
    ],
)
def test_a_size_that_is_no_number_failed_with_an_empty_message(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"{name} must be a"):
        strategy_of(**options)
