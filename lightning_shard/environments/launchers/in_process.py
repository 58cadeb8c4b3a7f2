"""The launcher of ranks that are threads of this process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shard.backends.in_process.faults import RankDropped, faults_to_inject
from lightning_shard.backends.in_process.world import ElasticWorld, World, current_world
from lightning_shard.backends.liveness.thread import TERMINATED_STATUS
from lightning_shard.environments.launchers import _lightning
from lightning_shard.environments.launchers.failures import Circumstances, tell
from lightning_shard.environments.launchers.replicas import Replica, adopt, told_once
from lightning_shard.errors import ConfigError, RankFailedError

_CALLERS_THREAD = 0


class InProcessLauncher(_lightning.Launcher):
    """Runs a trainer's function on every rank of an in-process world.

    Rank 0 runs on this thread and on the originals, so that the caller's model holds the trained
    weights afterwards. The other ranks run on copies: see `replicas`.

    Args:
        num_ranks: Number of ranks.
        is_elastic: Whether the others go on when a rank is lost or leaves, and ranks may be added.
            If the rank on this thread does not come to the end, the caller's model and trainer get
            the results of the lowest one that does: see `survivors`.
        merge: Makes one result of all ranks' and their Trainers; rank 0's when left out.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        is_elastic: bool = False,
        merge: Callable[[Sequence[Any], Sequence["pl.Trainer | None"]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._merge = merge
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

        The error of the first rank to fail is raised; of elastic ranks only if none ends well.
        """
        world = self._make_world()
        if (outer := current_world()) is not None:
            raise ConfigError(
                f"An in-process world of {outer.num_ranks} ranks runs already. Inside it, train "
                "with a strategy that starts no ranks of its own, or launch outside it."
            )
        given = list(args)  # a copy may exchange an iterator among them
        mine = _CallersRank(world, lambda: function(*given, **kwargs), trainer)

        def run_rank(thread: int) -> Any:
            if thread == _CALLERS_THREAD:
                return mine.run()
            return replicas[thread - 1].run(partial(_meet, world))

        try:
            others = range(1, world.num_threads)
            replicas = [Replica.copy_of(function, trainer, given, kwargs) for _ in others]
            with told_once(trainer):
                results = world.run(run_rank)
            if world.termination.was_terminated and not world.termination.is_ending:
                if trainer is not None:
                    _lightning.mark_terminated(trainer)
                raise SIGTERMException(TERMINATED_STATUS)  # it came after the last step
            survivor = _lowest_survivor(world)
        except BaseException as error:
            mine.hand_to_lightning(error)
            raise
        if mine.exit is not None:
            raise mine.exit
        if self._merge is not None and len(results) == self._num_ranks:
            trainers = [trainer, *(one.trainer for one in replicas)]
            results = [self._merge(results, trainers), *results[1:]]
        _warn_of_failures(world)
        if isinstance(world, ElasticWorld) and survivor != _CALLERS_THREAD:
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


class _CallersRank:
    """The rank that runs on the caller's thread, and on the caller's model and trainer."""

    def __init__(
        self, world: World, function: Callable[[], Any], trainer: "pl.Trainer | None"
    ) -> None:
        self._world, self._function, self._trainer = world, function, trainer
        self._has_told = False
        self.exit: _lightning.TunerExit | None = None

    def run(self) -> Any:
        """Run the function; callbacks hear of its error while the world still stands."""
        try:
            return self._function()
        except _lightning.TunerExit as left:
            self.exit = left
            if self._trainer is not None:
                self._trainer.strategy.teardown()
            return None
        except RankDropped:
            raise
        except BaseException as error:
            found = _meet(self._world, error)
            if self._trainer is not None:
                self._has_told = True
                tell(self._trainer, found)
            raise

    def hand_to_lightning(self, error: BaseException) -> None:
        """Let callbacks hear of an error exactly once before it leaves the launcher."""
        if self._trainer is None:
            return
        if not self._has_told:  # another rank has raised after this one's end
            tell(self._trainer, Circumstances(heard=error))
        _lightning.skip_hooks_of_exception(self._trainer)


def _meet(world: World, error: BaseException) -> Circumstances:
    """Let the other ranks raise, too, and return the error that the caller will get."""
    failure = world.await_failures(error)
    is_callers = world.scheduler.running.index == _CALLERS_THREAD
    heard = failure.first if is_callers and not world.is_elastic else error
    return Circumstances(heard=heard, is_common=failure.is_common, gone=failure.gone)


def _lowest_survivor(world: World) -> int:
    """Return the thread whose results are the run's."""
    if not isinstance(world, ElasticWorld):
        return _CALLERS_THREAD
    survivors = world.survivors()
    if not survivors:
        raise RankFailedError(
            f"All {world.num_threads} ranks were dropped or have left before the end, and nobody "
            "could go on. Start again from a checkpoint, with fewer faults."
        )
    return _CALLERS_THREAD if _CALLERS_THREAD in survivors else survivors[0]


def _warn_of_failures(world: World) -> None:
    """Warn of ranks that have failed while others came to the end."""
    failures = world.failures_of_members() if isinstance(world, ElasticWorld) else {}
    for thread, error in failures.items():
        rank_zero_warn(
            f"Thread {thread} of the in-process ranks failed, and the others went on without it: "
            f"{type(error).__name__}: {error}"
        )


_lightning.share_class_wrapping()
