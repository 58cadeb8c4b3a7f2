"""A pipeline's dimension needs no strategy: what it refuses, and what it says of a dry run."""

import copy
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.planning.description import Description
from lightning_shard.strategies.dimensions.dimension import PlainRunner
from lightning_shard.strategies.dimensions.pipeline import (
    PipelineDimension,
    StageOptions,
    explaining_absent,
)
from tests.strategies.dimensions.views import view
from tests.strategies.parity import ignoring
from tests.strategies.stacks import ByHand, Stack, fit, pipeline

TWO = ParallelMesh(pp=2)


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def dimension(**options: Any) -> PipelineDimension:
    return PipelineDimension(None, StageOptions(**options))


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
    assert alone.runner(plain) is plain
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


pytestmark = ignoring()


class Average(nn.Module):
    """As of timm: a copy of a network, every entry of whose state is averaged."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), network.state_dict().values(), strict=True)
        for mean, value in pairs:
            mean.copy_(mean * 0.9 + value * 0.1)


class Averaged(Stack):
    """Holds the average beside the network; `blocks=` names the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.head = nn.Identity()
        self.network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.blocks = nn.ModuleList()
        self.average = Average(self.network)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update(self.network)


class InACallback(Averaged):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave it to the callback."""

    def callbacks(self) -> list[Callback]:
        return [_Averaging()]


class _Averaging(Callback):
    average: Average

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.average = Average(pl_module.network)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.average.update(pl_module.network)


def averaged(style: type[Stack], strategy: Any) -> dict[str, Tensor]:
    fitted = fit(style, strategy, max_epochs=1)
    callbacks: list[Any] = fitted.trainer.callbacks  # type: ignore[attr-defined]
    found = [one.average for one in callbacks if isinstance(one, _Averaging)]
    return {**fitted.model.state_dict(), **(found[0].state_dict() if found else {})}


@pytest.mark.parametrize("style", [Averaged, InACallback])
def test_an_average_by_hand_met_parameters_without_elements(style: type[Stack]) -> None:
    strategy = pipeline(2, "1f1b", blocks="network")
    torch.testing.assert_close(averaged(style, strategy), averaged(style, "auto"))


def test_other_errors_of_hooks_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="my own"), explaining_absent(["weight"]):
        raise RuntimeError("my own")
