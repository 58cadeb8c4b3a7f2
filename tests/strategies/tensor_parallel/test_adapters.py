"""Low-rank adapters beside frozen split layers, and split blocks that ask for elements."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from tests.strategies.parity import ignoring, quiet_trainer
from tests.tensor_parallel.test_wrappers import MLP, WIDTH, Linear

pytestmark = ignoring(".* microbatches are fewer than the")


class Counted(nn.Module):
    """Asks for elements, so that its result is not known without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(lambda one: one)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x + self.mlp(self.norm(x))


class Blocks(L.LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4)


def fit(make: Any, strategy: Any = "auto", **options: Any) -> tuple[Blocks, L.Trainer]:
    torch.manual_seed(0)
    model = Blocks(make)
    fixed = {"use_distributed_sampler": False, "gradient_clip_val": None, "max_steps": -1}
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=1, **fixed, **options
    )
    trainer.fit(model)
    return model, trainer


STAGES = [0, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", STAGES)
def test_adapters_beside_frozen_layers(zero_stage: int, tmp_path: Path) -> None:
    strategy = TensorParallelStrategy(
        backend="in_process", num_ranks=4, tensor_parallel_size=2, zero_stage=zero_stage
    )
    (alone, _), (split, trainer) = fit(lambda: MLP(Linear)), fit(lambda: MLP(Linear), strategy)
    torch.testing.assert_close(split.state_dict(), alone.state_dict(), rtol=1e-5, atol=2e-7)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(saved, alone.state_dict(), rtol=1e-5, atol=2e-7)


@pytest.mark.slow
def test_layers_in_parts_keep_nothing_of_a_block_that_is_skipped() -> None:
    """The pipeline took what an entrance keeps for an auxiliary loss of the block."""
    strategy = HybridParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, tensor_parallel_size=2
    )
    (alone, _), (split, _) = fit(Counted), fit(Counted, strategy)
    torch.testing.assert_close(split.state_dict(), alone.state_dict(), rtol=1e-5, atol=2e-7)
