"""The launcher of ranks that are processes."""

import signal
import subprocess
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.core import settings
from lightning_shard.environments.launchers import _lightning
from lightning_shard.environments.launchers.failures import Circumstances, Salvaged, all_raise, tell
from lightning_shard.environments.launchers.replicas import told_once
from lightning_shard.errors import ConfigError, RankFailedError


class ProcessLauncher(_lightning.SubprocessScriptLauncher):
    """Lightning's launcher, with ranks that tell each other when one fails.

    It hears of an exception before the callbacks, which might wait for other ranks. See `failures`.

    Attributes:
        takes_newcomers: Whether processes may join the ranks that it has started.
        watched: The ranks that this process has started and Lightning ends with the first to fail.
    """

    takes_newcomers: ClassVar[bool] = False
    watched: "ClassVar[list[subprocess.Popen[bytes]]]" = []  # noqa: RUF012  (of the process)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the child processes, which cannot be pickled."""
        return {**vars(self), "procs": []}

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1  # there is nothing to start

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: "pl.Trainer | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other ranks, unless a launcher outside has, and run `function` here.

        The other ranks are told of its error.
        """
        self._begin()
        if settings.joins_job() and not self.takes_newcomers:
            raise ConfigError(
                "This process joins an elastic job (LIGHTNING_SHARD_JOB is set), but a run of its "
                "script is not elastic, so that nobody can join it. Give every run of the script "
                "an ElasticStrategy, or unset LIGHTNING_SHARD_JOB to start a job of its own."
            )
        try:
            with told_once(trainer):
                result = super().launch(function, *args, trainer=trainer, **kwargs)
        except _lightning.TunerExit:  # every rank's, and no failure
            raise
        except BaseException as error:
            explained = _explain(error, _running(trainer))
            is_common = _have_all_raised(explained, trainer)
            if trainer is not None:
                tell(trainer, _circumstances(explained, is_common))
                _lightning.skip_hooks_of_exception(trainer)
            if explained is not error:
                raise explained from error
            raise
        _terminate_if_asked()
        return result

    def _begin(self) -> None:
        """Prepare what ranks need that something outside has started, too."""

    @override
    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        ProcessLauncher.watched = self.procs


def _running(trainer: "pl.Trainer | None") -> str:
    function = None if trainer is None else trainer.state.fn
    return "the run" if function is None else f"trainer.{function.value}"


def _explain(error: BaseException, operation: str) -> BaseException:
    """Return the error, or one that names the rank in place of a transport's."""
    lifeline = liveness.current()
    if lifeline is None or not is_about_a_peer(error):
        return error
    return lifeline.explain(operation)


def _have_all_raised(error: BaseException, trainer: "pl.Trainer | None") -> bool:
    """Tell the other ranks of an error; return whether all have raised at the same place."""
    strategy = None if trainer is None else trainer.strategy
    lifeline = liveness.current()
    if isinstance(strategy, Salvaged) and strategy.run.has_shut_down_together:
        return True
    if isinstance(error, RankFailedError):
        if lifeline is not None:
            lifeline.announce_failure(error)
        return False
    return all_raise(error)


def _circumstances(error: BaseException, is_common: bool) -> Circumstances:
    lifeline = liveness.current()
    dead = None if lifeline is None else lifeline.dead_rank
    gone = () if dead is None else (dead,)
    return Circumstances(heard=error, is_common=is_common, gone=gone)


def _terminate_if_asked() -> None:
    """End the process when SIGTERM came too late for the run to stop at."""
    lifeline = liveness.current()
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if lifeline is not None and lifeline.was_terminated and is_default:
        signal.raise_signal(signal.SIGTERM)
