"""Shows in the progress bar how many times fewer bytes training steps send with compression."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_shard.errors import ConfigError
from lightning_shard.option_checks import checked_options
from lightning_shard.strategies.data_parallel import DataParallelStrategy


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
