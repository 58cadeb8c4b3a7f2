"""Loggers that trace the module on rank 0 when a fit starts."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO3Strategy,
)
from tests.strategies.compiled import Compiled
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring("`torch.jit.trace", ".*number of training batches")


class GraphLogger(CSVLogger):
    """Draws as TensorBoard's writer does, of which there need not be one."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.graphs: list[str] = []

    @rank_zero_only
    def log_graph(self, model: L.LightningModule, input_array: Any = None) -> None:
        inputs = model._apply_batch_transfer_handler(model.example_input_array)
        self.graphs.append(str(torch.jit.trace(model.eval(), inputs).inlined_graph))
        model.train()


class Drawn(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 4)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data(24), batch_size=4)


def graphs_of(folder: Any, strategy: Any) -> list[str]:
    torch.manual_seed(7)
    logger = GraphLogger(folder)
    trainer = quiet_trainer(strategy=strategy, max_steps=1, logger=logger)
    trainer.fit(Drawn())
    assert "log_graph" not in vars(logger)
    return logger.graphs


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ZeRO3Strategy(backend="in_process", num_ranks=2),
        lambda: TensorParallelStrategy(backend="in_process", num_ranks=2),
        lambda: PipelineParallelStrategy(backend="in_process", num_ranks=2),
        pytest.param(
            lambda: HybridParallelStrategy(
                backend="in_process", num_ranks=4, tensor_parallel_size=2, pipeline_parallel_size=2
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero3", "tensor", "pipeline", "hybrid"],
)
def test_a_module_of_which_rank_0_has_a_part_is_not_traced_by_it_alone(
    strategy: Any, tmp_path: Any
) -> None:
    """Rank 0 alone traced a module of which it has a part."""
    (graph,) = graphs_of(tmp_path, strategy())
    (alone,) = graphs_of(tmp_path, "auto")
    assert graph.count("aten::linear") == alone.count("aten::linear") == 10
