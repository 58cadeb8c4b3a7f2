"""Three dimensions of parallelism train as one device does, in hooks and random numbers, too."""

import warnings
from collections import deque
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import HybridParallelStrategy
from lightning_shard.core.mesh import AXES, ParallelMesh
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
from tests.strategies.pipeline_parallel.test_randomness import Dropping
from tests.strategies.stacks import WIDTH, OfEveryRank, Stack, fit

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
def test_a_size_that_is_no_number_is_refused_with_a_message(options: dict[str, Any]) -> None:
    """A size that is no number failed with an empty message."""
    (name,) = options
    with pytest.raises(ConfigError, match=rf"{name} must be a"):
        strategy_of(**options)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class SplitDropping(Dropping):
    """Its layers can be split; the dropout stands beside them."""

    class block(Dropping.block):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.down(F.gelu(self.up(x)))


class Summing(SplitDropping):
    """Keeps the sum of its weights after every batch instead."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = deque()  # no longer the blocks'

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(sum(param.sum().item() for param in self.parameters()))


def seen_by_ranks(style: type[Stack], **options: Any) -> tuple[list[Any], ParallelMesh]:
    """Fit, and return what each rank's module has kept, and the grid."""
    gather = OfEveryRank()

    class Gathered(style):  # type: ignore[valid-type,misc]
        def callbacks(self) -> list[L.Callback]:
            return [gather]

    strategy = HybridParallelStrategy(
        backend="in_process", data_parallel_size=2, plan=PLAN, **options
    )
    num_ranks = 2 * prod(one.size or 1 for one in strategy.dimensions)
    fit(Gathered, strategy, devices=num_ranks, max_epochs=1, limit_train_batches=2)
    return gather.ranks, strategy.mesh


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("pp", "tp", "axis_order"),
    [(1, 2, AXES), (2, 1, AXES), pytest.param(2, 2, ("dp", "tp", "pp"), marks=pytest.mark.slow)],
)
def test_data_parallel_ranks_draw_their_own_dropout(
    pp: int, tp: int, axis_order: tuple[str, ...]
) -> None:
    """Data-parallel ranks repeated each other's dropout."""

    def drawn() -> tuple[list[set[Any]], ParallelMesh]:
        ranks, mesh = seen_by_ranks(
            SplitDropping, pipeline_parallel_size=pp, tensor_parallel_size=tp, axis_order=axis_order
        )
        return [set(rank) for rank in ranks], mesh

    ranks, mesh = drawn()
    for rank, own in enumerate(ranks):
        assert own
        for other, theirs in enumerate(ranks):
            if other in mesh.peers("tp", rank):
                assert own == theirs
            else:
                assert not own & theirs
    assert drawn()[0] == ranks


class LeavingOut(SplitDropping):
    """Leaves out blocks at random."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if torch.rand(()) > 0.5:
                x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
def test_ranks_of_stage_3_leave_out_the_same_blocks() -> None:
    """Ranks of stage 3 left out different blocks."""
    ranks, _ = seen_by_ranks(LeavingOut, zero_stage=3)
    assert ranks[0] == ranks[1]
    assert ranks[0]


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
def test_replicas_with_dropout_of_their_own_have_the_same_weights() -> None:
    (first, second), _ = seen_by_ranks(Summing, zero_stage=2)
    assert len(set(first)) == 2
    assert first == second


class ByHand(Stack):
    """Adds weights to gradients in the hook before an update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.add_(param.detach(), alpha=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_split_layers_are_full_in_hooks_of_a_step(stage: int) -> None:
    """On some ranks they were parts, so that ranks waited for each other in other calls."""
    strategy = HybridParallelStrategy(
        backend="in_process",
        tensor_parallel_size=2,
        zero_stage=stage,
        plan={"blocks.*.layer": "colwise_gather_output"},
    )
    got, alone = fit(ByHand, strategy, devices=4), fit(ByHand)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-5, atol=2e-7)


HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Noting(Stack):
    """Notes sums over its weights in each hook of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, list[float]]] = []

    def note(self, place: str, params: Any) -> None:
        sums = [float(param.detach().square().sum()) for param in params]
        self.noted.append((place, sums))


class NotingByHand(Noting):
    """Notes also what it has in the optimizer, in the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        params = optimizer.param_groups[0]["params"]
        self.note("gradients", [param.grad for param in params])
        optimizer.step()
        self.note("groups", params)
        return loss


def _noting(name: str) -> Any:
    def hook(self: Noting, *_: Any) -> None:
        self.note(name, self.parameters())

    return hook


for _name in HOOKS:
    setattr(Noting, _name, _noting(_name))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("style", [Noting, NotingByHand])
def test_weights_that_a_step_leaves_unsharded_are_full_in_hooks(
    style: type[Noting], stage: int
) -> None:
    """Under stage 3 hooks between a forward and its update saw this rank's part of split layers.

    So did a step that takes parameters from its optimizer, under every stage.
    """
    strategy = HybridParallelStrategy(
        backend="in_process",
        tensor_parallel_size=2,
        zero_stage=stage,
        plan={"blocks.*.layer": "colwise_gather_output", "embed": "colwise_gather_output"},
    )
    got, alone = fit(style, strategy, devices=4), fit(style)
    assert [place for place, _ in got.model.noted] == [place for place, _ in alone.model.noted]
    for (place, sums), (_, expected) in zip(got.model.noted, alone.model.noted, strict=True):
        assert sums == pytest.approx(expected, rel=1e-4, abs=1e-6), place
