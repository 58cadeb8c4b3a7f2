"""Split models that are built on meta: each rank allocates its part, and one unit at a time."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import nn

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from tests.checkpoint.kept_runs import Regressor
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.examples.commands import ignoring_advice
from tests.strategies.rises import watched_starts

pytestmark = ignoring_advice()

WIDTH, BLOCKS = 128, 8
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
STRATEGIES: dict[str, Any] = {
    "tensor": lambda: TensorParallelStrategy(
        backend="in_process", num_ranks=2, announce=False, plan=PLAN
    ),
    "tensor found": lambda: TensorParallelStrategy(
        backend="in_process", num_ranks=2, announce=False
    ),
    "tensor zero3": lambda: TensorParallelStrategy(
        backend="in_process",
        num_ranks=4,
        tensor_parallel_size=2,
        zero_stage=3,
        announce=False,
        plan=PLAN,
        bucket_mb=0.1,
    ),
    "pipeline": lambda: PipelineParallelStrategy(
        backend="in_process", num_ranks=2, num_microbatches=2, announce=False
    ),
    "hybrid": lambda: HybridParallelStrategy(
        backend="in_process",
        num_ranks=8,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        zero_stage=2,
        num_microbatches=2,
        announce=False,
        plan=PLAN,
        bucket_mb=0.1,
    ),
}


class Block(nn.Module):
    """Two layers, to twice the width and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Deep(Regressor):
    """Blocks that are most of it."""

    def __init__(self) -> None:
        super().__init__()
        size = self.embed.in_features
        self.embed, self.head = nn.Linear(size, WIDTH), nn.Linear(WIDTH, self.head.out_features)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))


def start(strategy: Any, *, empty: bool, **options: Any) -> Deep:
    """Fit a model from one seed."""
    L.seed_everything(4, verbose=False)
    trainer = quiet_trainer(strategy, **options)
    with trainer.init_module(empty_init=empty):
        model = Deep()
    trainer.fit(model)
    return model


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "parts", "units"),
    [("tensor", 2, 0), ("tensor zero3", 4, 1), ("pipeline", 2, 0), ("hybrid", 4, 1)],
)
def test_no_rank_of_a_split_model_holds_more_than_its_part_and_one_unit(
    name: str, parts: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rises = watched_starts(monkeypatch)
    start(STRATEGIES[name](), empty=True, max_steps=0)
    block = 2 * 2 * WIDTH * WIDTH * 4
    small = 2**15  # biases, buffers, what ranks tell each other
    for held, above in rises:
        assert held < BLOCKS * block / parts + block / 2
        # a unit, and beside it the layer that is cut, with its part
        assert 0 < above <= (units + 0.75) * block + small


@pytest.mark.parametrize("name", list(STRATEGIES))
@pytest.mark.few_cases(1)
def test_a_split_model_on_meta_trains_as_one_built_on_the_cpu(name: str) -> None:
    expected, trained = (start(STRATEGIES[name](), empty=one, max_steps=2) for one in (False, True))
    for key, value in expected.state_dict().items():
        assert torch.equal(trained.state_dict()[key], value), key


class DrawnApart(Deep):
    """Built on meta after each rank has seeded by its number, or all with that of the first."""

    apart = True

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.losses: list[Any] = []

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        torch.manual_seed(self.trainer.strategy.mesh_rank if self.apart else 0)
        with torch.device("meta"):
            built = Deep()
        torch.manual_seed(7)
        for name, part in built.named_children():
            self.add_module(name, part)
        for name, buffer in built.named_buffers(recurse=False):
            self.register_buffer(name, buffer)


class DrawnAlike(DrawnApart):
    """All ranks draw alike."""

    apart = False


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_where_ranks_have_drawn_apart_the_first_one_s_values_win(name: str) -> None:
    ends = []
    for kind in (DrawnAlike, DrawnApart):
        model = kind()
        quiet_trainer(STRATEGIES[name](), max_steps=1).fit(model)
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(ends[1][key], value), key
