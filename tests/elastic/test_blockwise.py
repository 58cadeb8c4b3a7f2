"""Ranks that come and go have the parts of states in blocks that one device would have."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ElasticStrategy
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.elastic.recovery import agree, restore
from lightning_shard.optim.blockwise import states_in_blocks
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Rank, Setting, assert_same
from tests.groups import all_ranks
from tests.optim.blockwise_optimizers import OPTIMIZERS
from tests.optim.test_blockwise import style
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit

pytestmark = ignoring()

_SETTING, _STEPS = Setting(stage=2), 3


class Layers(nn.Sequential):
    """Parameters that end within blocks, and small ones."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 13), nn.Linear(13, 1))


def start(kind: str, stage: int) -> Rank:
    torch.manual_seed(1)
    model = Layers()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.05)
    blocks = states_in_blocks([optimizer], model)
    assert blocks
    options = EngineOptions(stage=stage, bucket_mb=1e-6, blocks=blocks)
    engine = DataParallelEngine(model, all_ranks(), options)
    return Rank(
        model=model,
        optimizer=optimizer,
        sharded=ShardedOptimizer(optimizer, engine),
        engine=engine,
        collectives=engine.collectives,
        setting=replace(_SETTING, stage=stage),
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 3), (4, 2)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_snapshots_become_the_state_of_another_number_of_ranks(
    kind: str, before: int, after: int, stage: int
) -> None:
    """Elastic training took these optimizers with replicated state alone."""

    def trained(_: int) -> tuple[Snapshot, Any]:
        rank = start(kind, stage)
        rank.train(0, _STEPS)
        return rank.snapshot(_STEPS), rank.full()

    results = [one for one in run_ranks(trained, before) if one is not None]
    holdings: list[list[Snapshot]] = [[] for _ in range(after)]
    for shard, (snapshot, _) in enumerate(results):
        holdings[shard % after].append(snapshot)

    def recovered(index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rank = start(kind, stage)
        rank.train(0, 1)
        plan = agree(rank.collectives, holdings[index])
        assert plan is not None
        restore(rank.collectives, plan, holdings[index], rank.engine, [rank.optimizer])
        return rank.full()

    assert_same(run_ranks(recovered, after)[0], results[0][1])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_elastic_ranks_train_as_those_that_have_full_states(kind: str, scheme: str) -> None:
    expected, got = (
        fit(style(kind), ElasticStrategy(scheme=one, backend="in_process", num_ranks=2)).weights
        for one in ("shard_ddp", scheme)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
