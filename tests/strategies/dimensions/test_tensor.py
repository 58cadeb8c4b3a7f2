"""What the dimension of tensor parallel says of a dry run, without a strategy."""

from typing import Any

import pytest

from lightning_shard import ConfigError
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.planning.description import Description
from lightning_shard.strategies.dimensions.tensor import TensorDimension
from tests.strategies.stacks import Stack

PLAN = {"embed": "colwise", "head": "rowwise"}


def described(dimension: TensorDimension, mesh: ParallelMesh, module: Stack) -> Description:
    found = Description(mesh=mesh, engine=EngineOptions(stage=0), shard_size=1)
    measure: Any = None
    return dimension.described(found, module, measure)


def test_a_given_plan_is_believed_also_on_meta() -> None:
    layers = described(TensorDimension(plan=PLAN), ParallelMesh(tp=2), Stack().to("meta")).layers
    assert [one.name for one in layers] == ["embed", "head"]


def test_a_plan_cannot_be_found_for_parameters_on_meta() -> None:
    with pytest.raises(ConfigError, match="plan='auto' tries layers of Stack out"):
        described(TensorDimension(), ParallelMesh(tp=2), Stack().to("meta"))


def test_one_rank_splits_nothing() -> None:
    alone = described(TensorDimension(plan=PLAN), ParallelMesh(dp=2), Stack())
    assert alone.layers == ()
