"""The launcher of ranks that are threads of this process."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shard.backends.in_process import ElasticWorld, World, current_world
from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.launchers._lightning import Launcher, TunerExit
from lightning_shard.launchers.adoption import adopt
from lightning_shard.launchers.loggers import told_once
from lightning_shard.launchers.replicas import Replica

_CALLERS_THREAD = 0


class InProcessLauncher(Launcher):
    """Runs a trainer's function on every rank of an in-process world.

    Rank 0 runs on this thread and on the originals, so that the caller's model holds the trained
    weights afterwards and the caller's trainer its metrics and state. The other ranks run on
    copies: see `replicas`. Faults come from `lightning_shard.testing.injected_faults` around it.

    Args:
        num_ranks: How many ranks.
        is_elastic: Whether the others go on when a rank is lost or leaves, and ranks may be added.
            If the rank on this thread does not come to the end, the caller's model and trainer get
            the results of the lowest one that does: see `adoption`.
    """

    def __init__(self, num_ranks: int, *, is_elastic: bool = False) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._is_elastic = is_elastic

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
            RankFailedError: Every rank was dropped.
            BaseException: What the first rank to fail raised, with a note that names the rank; of
                elastic ranks only if none has come to the end.
        """
        world = self._make_world()
        if (outer := current_world()) is not None:
            raise ConfigError(
                f"An in-process world of {outer.num_ranks} ranks runs already. Inside it, train "
                "with a strategy that starts no ranks of its own, or launch outside it."
            )
        replicas = [
            Replica.copy_of(function, trainer, args, kwargs) for _ in range(1, world.num_threads)
        ]

        exits: list[TunerExit] = []

        def run_rank(thread: int) -> Any:
            if thread != _CALLERS_THREAD:
                return replicas[thread - 1].run()
            try:
                return function(*args, **kwargs)
            except TunerExit as left:  # by every rank; Lightning tears down after the world's end
                exits.append(left)
                if trainer is not None:
                    trainer.strategy.teardown()
                return None

        with told_once(trainer):
            results = world.run(run_rank)
        if exits:
            raise exits[0]
        if not isinstance(world, ElasticWorld):
            return results[_CALLERS_THREAD]
        survivor = _lowest_survivor(world)
        if survivor != _CALLERS_THREAD:
            ended = world.has_ended_well(_CALLERS_THREAD)
            adopt(replicas[survivor - 1], trainer, args, kwargs, has_ended_well=ended)
        return results[survivor]

    def _make_world(self) -> World:
        faults, struck = faults_to_inject()
        if self._is_elastic:
            return ElasticWorld(self._num_ranks, faults, struck=struck)
        return World(self._num_ranks, faults, struck=struck)

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: there are no other processes."""


def _lowest_survivor(world: ElasticWorld) -> int:
    """Return the thread whose results are the run's, and warn of ranks that failed meanwhile."""
    survivors = world.survivors()
    if not survivors:
        raise RankFailedError(
            f"All {world.num_threads} ranks were dropped or have left before the end, and nobody "
            "could go on. Start again from a checkpoint, with fewer faults."
        )
    for thread, error in world.failures_of_members().items():
        rank_zero_warn(
            f"Thread {thread} of the in-process ranks failed, and the others went on without it: "
            f"{type(error).__name__}: {error}"
        )
    return _CALLERS_THREAD if _CALLERS_THREAD in survivors else survivors[0]
