"""The launcher of ranks that are processes."""

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.launchers._lightning import TunerExit
from lightning_shard.launchers.loggers import told_once


class ProcessLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, whose ranks tell each other when one fails.

    It hears of an exception before the callbacks do, which might wait for other ranks: a checkpoint
    on an exception of one rank alone would.
    """

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
        """Start the other ranks, where nobody else has, and run `function` here.

        Raises:
            RankFailedError: Another rank has failed, whoever's call has noticed.
            BaseException: What `function` raises, of which the other ranks are told.
        """
        try:
            with told_once(trainer):
                result = super().launch(function, *args, trainer=trainer, **kwargs)
        except TunerExit:  # every rank's, and no failure
            raise
        except BaseException as error:
            _announce(error, _running(trainer))
            raise
        _terminate_if_asked()
        return result


def _running(trainer: "pl.Trainer | None") -> str:
    function = None if trainer is None else trainer.state.fn
    return "the run" if function is None else f"trainer.{function.value}"


def _announce(error: BaseException, operation: str) -> None:
    """Tell the other ranks; raise another error where the transport's does not name the rank."""
    lifeline = liveness.current()
    if lifeline is None:
        return
    if is_about_a_peer(error):
        explained = lifeline.explain(operation)
        lifeline.announce_failure(explained)
        raise explained from error
    lifeline.announce_failure(error)


def _terminate_if_asked() -> None:
    """End the process when SIGTERM came too late for the run to stop at."""
    lifeline = liveness.current()
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if lifeline is not None and lifeline.was_terminated and is_default:
        signal.raise_signal(signal.SIGTERM)
