"""Lightning on in-process ranks where only the last rank of a pipeline finishes its steps."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.pipeline_parallel.microbatches import merge_outputs, split_batch
from lightning_shard.strategies.trainer.logs.step_logs import StepLogs
from lightning_shard.strategies.trainer.step_collectives import MetricGroups
from tests.strategies.parity import quiet_trainer


class Cut(BaseException):
    """Ends a step at the network."""


class Stage(nn.Module):
    """A network that only the last stage has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_cut:
            raise Cut
        return x * self.weight


class PipelineOfRanks(SingleDeviceStrategy):
    """Every rank has the whole module; all but the last of a pipeline cut each step short.

    The last one first runs a step of an earlier stage, as it does where it holds several.
    """

    def __init__(self, pipeline: Collectives, data: Collectives, num_microbatches: int) -> None:
        super().__init__(device="cpu")
        self.pipeline = pipeline
        self.num_microbatches = num_microbatches
        self._data = data
        self._source = pipeline.size - 1

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        self.metrics = MetricGroups(self.lightning_module, self._data.group)
        self.logs = StepLogs(self.lightning_module, self.pipeline, self._source)

    def teardown(self) -> None:
        self.logs.restore()
        self.metrics.restore()
        super().teardown()

    def _run(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        parts = split_batch(batch, self.num_microbatches)
        outputs = []
        for part in parts:
            for is_last in (False, self.pipeline.rank == self._source):
                self.lightning_module.net.is_cut = not is_last
                with suppress(Cut), self.logs.recording(part.size, counts=is_last):
                    outputs.append(step(part.content, *args))
        sizes = [part.size for part in parts]
        return self.logs.replay(merge_outputs(outputs, sizes) if outputs else None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        loss = self._run(self.lightning_module.training_step, *args, **kwargs)
        return loss.detach() + 0 * self.lightning_module.net.weight.sum()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._run(self.lightning_module.validation_step, *args, **kwargs)


def pipelines(rank: int, num_stages: int, num_ranks: int) -> tuple[Collectives, Collectives]:
    """Return this rank's pipeline (of neighbouring ranks) and its data-parallel group."""
    first = rank // num_stages * num_stages
    groups = []
    for ranks in (
        range(first, first + num_stages),
        range(rank % num_stages, num_ranks, num_stages),
    ):
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        groups.append(Collectives(group))
    return groups[0], groups[1]


def trainer_on(strategy: Any, **options: Any) -> L.Trainer:
    return quiet_trainer(strategy=strategy, accelerator="cpu", devices=1, **options)
