"""A start on real processes whose resident set is watched, for `run_processes`."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ZeRO3Strategy
from lightning_shard.data_parallel.deferred_init.recorder import recording
from lightning_shard.data_parallel.deferred_init.tape import recipe_of
from tests.strategies.parity import ignore_upstream_warnings, quiet_trainer

WIDTH, NUM_BLOCKS = 2048, 8  # 16 MiB each


class Wide(L.LightningModule):
    """Blocks that are units of their own, and a callback of its own for the start of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.found: dict[str, int] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return sum(block(batch[0]) for block in self.blocks).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_fit_start(self) -> None:
        units = [unit.flats for unit in self.trainer.strategy.engine.units]
        self.found["peak"] = resident("VmHWM")
        self.found["shards"] = sum(flat.shard.nbytes for flats in units for flat in flats)
        self.found["unit"] = max(sum(flat.layout.full_numel * 4 for flat in u) for u in units)


def resident(kind: str) -> int:
    """Return bytes of this process's resident set: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024


def rise_at_start(*, on_meta: bool) -> dict[str, int]:
    """Return how far the resident set rises until a fit starts, and what a rank then holds."""
    ignore_upstream_warnings()
    with recording(to_meta=True):  # brings what is imported late
        layer = nn.Linear(4, 4)
    recipe = recipe_of(layer.weight)
    assert recipe is not None
    recipe.read(torch.float32)
    strategy = ZeRO3Strategy(backend="gloo", announce=False)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=0, accumulate_grad_batches=1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    with trainer.init_module(empty_init=on_meta):
        model = Wide()
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(4, WIDTH)), batch_size=2))
    return {**model.found, "rise": model.found["peak"] - before}
