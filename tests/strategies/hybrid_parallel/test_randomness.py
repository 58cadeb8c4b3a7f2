"""Random numbers of a step: alike on the ranks of a layer, others on other data and stages."""

from collections import deque
from math import prod
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import HybridParallelStrategy
from lightning_shard.core.mesh import AXES, ParallelMesh
from tests.strategies.parity import ignoring
from tests.strategies.pipeline_parallel.test_randomness import Dropping
from tests.strategies.stacks import WIDTH, OfEveryRank, Stack, fit

pytestmark = ignoring(".* microbatches are fewer than the")

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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("pp", "tp", "axis_order"),
    [(1, 2, AXES), (2, 1, AXES), pytest.param(2, 2, ("dp", "tp", "pp"), marks=pytest.mark.slow)],
)
def test_data_parallel_ranks_repeated_each_others_dropout(
    pp: int, tp: int, axis_order: tuple[str, ...]
) -> None:
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


def test_ranks_of_stage_3_left_out_different_blocks() -> None:
    ranks, _ = seen_by_ranks(LeavingOut, zero_stage=3)
    assert ranks[0] == ranks[1]
    assert ranks[0]


def test_replicas_with_dropout_of_their_own_have_the_same_weights() -> None:
    (first, second), _ = seen_by_ranks(Summing, zero_stage=2)
    assert len(set(first)) == 2
    assert first == second
