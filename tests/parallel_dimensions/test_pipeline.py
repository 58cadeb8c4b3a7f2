"""A pipeline's dimension needs no strategy: what it refuses, and what it says of a dry run."""

from typing import Any

import pytest
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import nn

from lightning_shard import ConfigError
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.mesh import ParallelMesh
from lightning_shard.parallel_dimensions.pipeline import PipelineDimension
from lightning_shard.parallel_dimensions.step_runner import PlainRunner
from lightning_shard.planner.description import Description
from lightning_shard.strategies.configs import ScheduleConfig
from tests.parallel_dimensions.views import view
from tests.strategies.stacks import Stack

TWO = ParallelMesh(pp=2)


class ByHand(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def dimension(**options: Any) -> PipelineDimension:
    return ScheduleConfig.of(options).dimension(None)


@pytest.mark.parametrize(
    ("module", "others", "message"),
    [
        (ByHand, {}, "ByHand optimizes by hand"),
        (Normed, {"layer_sync": TorchSyncBatchNorm()}, "runs its 4 microbatches one after"),
    ],
)
def test_what_no_pipeline_can_run_is_refused_before_anything_is_changed(
    module: type[Stack], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dimension().check(view(module(), TWO, **others))
    dimension().check(view(module(), ParallelMesh(dp=2), **others))  # one rank has all stages
    dimension(num_microbatches=1).check(view(Normed(), TWO, **others))


def test_one_rank_with_all_stages_leaves_the_model_and_the_steps_as_they_are() -> None:
    alone, run = dimension(), view(Stack(), ParallelMesh(dp=2))
    plain = PlainRunner(lambda: pytest.fail("no step runs"))
    assert alone.split(run) is None
    assert not alone.brings_model(run)
    assert alone.wrapped(plain) is plain
    with pytest.raises(ConfigError, match="There is no pipeline before"):
        _ = alone.pipeline
    alone.restore(full=False)  # of nothing


def test_a_dry_run_is_told_of_stages_and_schedule() -> None:
    def measure(*_: Any) -> Any:
        return pytest.fail("nothing is measured for stages by parameters")

    found = Description(mesh=TWO, engine=EngineOptions(stage=0), shard_size=1)
    module = Stack()
    described = dimension(num_microbatches=3, split=[1]).described(found, module, measure)
    assert described.stage_ranks == (0, 1)
    assert described.num_microbatches == 3
    assert described.cut is not None
    assert described.cut(module).bounds == (0, 1, 4)
    assert described.schedule is not None
    assert described.schedule(3).num_microbatches == 3
