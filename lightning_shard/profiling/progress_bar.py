"""Figures in the progress bar: what compression saves, and how evenly experts get tokens."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.model_parallel import HybridParallelStrategy


class CompressionRatio(Callback):
    """Log the bytes that dense steps would have sent over those that were sent, in this fit.

    Everything that a step sends counts: under "zero1" and "zero2" parameters travel in their own
    format, which keeps the ratio below 2 where they are in float32 and gradients are sent once in a
    step, and a dense warm-up shows for a while.

    Args:
        name: Name of the metric, which loggers get, too.

    Raises:
        ConfigError: The strategy does not compress; raised at the start of training.
    """

    @checked_options
    def __init__(self, name: str = "compression") -> None:
        self.name = name

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, DataParallelStrategy) or strategy.compression is None:
            raise ConfigError(
                f"CompressionRatio shows what compression saves, but {type(strategy).__name__} "
                f"compresses nothing here. Pass strategy=ZeRO2Strategy(compression='int8') or the "
                f"like, or leave the callback out."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, DataParallelStrategy)
        ratio = trainer.strategy.compression_tally().ratio
        pl_module.log(self.name, ratio, prog_bar=True, rank_zero_only=True)


class ExpertBalance(Callback):
    """Log the busiest expert's tokens over the mean, of the mixture where it is worst.

    It is 1 where all experts have the same, and the number of experts where one has all; a step
    takes as long as the busiest rank's. Beside it, `<name>/sent_away` is the share of tokens that
    went to an expert of another rank. Both are of the steps since they were logged last.

    Args:
        every_n_steps: Batches between two values, each of which takes an exchange of the counters.
        name: Name of the first metric, which loggers get, too; the second's begins with it.

    Raises:
        ConfigError: The strategy does not share experts; raised at the start of training.
    """

    @checked_options
    def __init__(self, every_n_steps: AtLeastOne = 50, name: str = "expert_imbalance") -> None:
        self.every_n_steps, self.name = every_n_steps, name
        self._before: Mapping[str, ExpertLoad] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, HybridParallelStrategy) or strategy.mesh.ep == 1:
            raise ConfigError(
                f"ExpertBalance shows how ranks share tokens out to experts, but "
                f"{type(strategy).__name__} shares no experts here. Pass "
                f"strategy=HybridParallelStrategy(expert_parallel_size=2) or the like, or leave "
                f"the callback out."
            )
        self._before = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every_n_steps:
            return
        assert isinstance(trainer.strategy, HybridParallelStrategy)
        now = trainer.strategy.expert_load()
        loads = [one.since(self._before.get(name)) for name, one in now.items()]
        self._before = now
        worst = max(loads, key=lambda one: one.imbalance)
        pl_module.log(self.name, worst.imbalance, prog_bar=True, rank_zero_only=True)
        num_tokens = max(sum(sum(one.tokens) for one in loads), 1)
        away = sum(one.num_sent_away for one in loads) / num_tokens
        pl_module.log(f"{self.name}/sent_away", away, rank_zero_only=True)
