"""When a strategy's ranks choose the size of their buckets, under `bucket_mb="auto"`.

a fit begins        they measure, and choose
an evaluation       the size of the last fit, whose optimizers' states may lie in such shards;
                    before any fit the default, which is not measured
a reconfiguration   of elastic ranks: rank 0's, which has trained, since shards move as they are
"""

from dataclasses import replace
from typing import Any

from lightning_shard.data_parallel.bucket_choice import BucketChoice, Links, choose
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import EngineOptions


class Buckets:
    """Remembers what a strategy's ranks have chosen.

    Attributes:
        choice: What they have chosen; None before, and where the size is given.
    """

    choice: BucketChoice | None = None

    def begin_fit(self) -> None:
        """Choose anew next time."""
        self.choice = None

    def share(self, strategy: Any, options: EngineOptions) -> None:
        """Go on with the choice of rank 0; each rank must call.

        Args:
            strategy: A `DataParallelStrategy` with its groups.
            options: Options that the strategy was made with.
        """
        if options.bucket_mb == "auto":
            self.choice = strategy.broadcast(self.choice)

    def sized(
        self, strategy: Any, options: EngineOptions, split: ModelSplit | None, *, is_fitting: bool
    ) -> EngineOptions:
        """Return options with a number for "auto"; each rank must call.

        Args:
            strategy: A `DataParallelStrategy` with its groups and its model.
            options: Options of the engine that is to be made.
            split: How the model is split over other ranks.
            is_fitting: Whether the engine is to train.
        """
        if options.bucket_mb != "auto":
            return options
        if self.choice is None and is_fitting:
            links = Links(
                groups=strategy.gradient_groups,
                reducing=strategy._reducing,
                everybody=strategy.collectives,
                device=strategy.root_device,
                are_timed=not strategy.is_in_process,
            )
            self.choice = choose(options, strategy.model, links, split)
        return replace(options, bucket_mb=None if self.choice is None else self.choice.mb)
