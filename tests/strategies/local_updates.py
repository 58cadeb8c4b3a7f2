"""Fits of strategies whose ranks train by themselves."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812

from lightning_shard import AsyncSGDStrategy, LocalSGDStrategy
from tests.strategies.local_sgd.local_training import BATCH, Tiny, TinyData, tiny_data
from tests.strategies.parity import quiet_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "average": lambda: LocalSGDStrategy(backend="in_process", sync_every=3),
    "diloco": lambda: LocalSGDStrategy(
        backend="in_process", sync_every=3, outer_optimizer="nesterov"
    ),
    "async": lambda: AsyncSGDStrategy(backend="in_process", staleness_bound=3, staleness_lr=None),
}


def fit(strategy: Any, module: Tiny, num_ranks: int, num_steps: int, **more: Any) -> L.Trainer:
    defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
    trainer = quiet_trainer(
        strategy=strategy, devices=num_ranks, max_steps=num_steps, **(defaults | more)
    )
    trainer.fit(module, datamodule=TinyData(tiny_data(num_ranks * BATCH * abs(num_steps))))
    return trainer
