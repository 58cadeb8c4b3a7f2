"""The launcher of ranks that are threads of this process."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_shard.backends.in_process import World, current_world
from lightning_shard.errors import ConfigError
from lightning_shard.launchers._lightning import Launcher, TunerExit
from lightning_shard.launchers.replicas import Replica


class InProcessLauncher(Launcher):
    """Runs a trainer's function on every rank of an in-process world.

    Rank 0 runs on this thread and on the originals, so that the caller's model holds the trained
    weights afterwards and the caller's trainer its metrics and state. The other ranks run on
    copies: see `replicas`.

    Args:
        num_ranks: How many ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: "pl.Trainer | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Run `function(*args, **kwargs)` on every rank and return rank 0's result.

        Raises:
            ConfigError: Called inside an in-process world, or something cannot be copied.
            BaseException: What the first rank to fail raised, with a note that names the rank.
        """
        world = World(self._num_ranks)
        if (outer := current_world()) is not None:
            raise ConfigError(
                f"An in-process world of {outer.num_ranks} ranks runs already. Inside it, train "
                "with a strategy that starts no ranks of its own, or launch outside it."
            )
        replicas = [
            Replica.copy_of(function, trainer, args, kwargs) for _ in range(1, self._num_ranks)
        ]

        exits: list[TunerExit] = []

        def run_rank(rank: int) -> Any:
            if rank > 0:
                return replicas[rank - 1].run()
            try:
                return function(*args, **kwargs)
            except TunerExit as left:  # by every rank; Lightning tears down after the world's end
                exits.append(left)
                if trainer is not None:
                    trainer.strategy.teardown()
                return None

        result = world.run(run_rank)[0]
        if exits:
            raise exits[0]
        return result

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: there are no other processes."""
