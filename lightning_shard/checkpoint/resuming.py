"""Resuming from a checkpoint, all of which is checked before the run holds any of it.

    load_model_state_dict    weights are loaded, by the module's own hooks; the old ones are kept
    setup                    the optimizers are made: their state is checked, and the state of
                             compression, local SGD and the loss scaler; if it does not fit, the
                             old weights are restored
    then                     shards are cut, and everything is loaded

Weights come first since hooks of the module may change it by what they find in a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.kept_misfits import kept_misfits
from lightning_shard.checkpoint.lent_values import LentValues
from lightning_shard.checkpoint.misfits import misfit_error
from lightning_shard.checkpoint.module_snapshot import ModuleSnapshot
from lightning_shard.checkpoint.optimizer_misfits import optimizer_misfits
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import CheckpointError

_ADVICE = (
    "Resume with the model, the optimizers and the settings that it was saved with, or load only "
    "the weights."
)


def agree_on_misfit(collectives: Collectives | None, error: CheckpointError | None) -> None:
    """Raise the same CheckpointError on every rank if a checkpoint does not fit on some.

    Args:
        collectives: Group of all ranks, each of which must call; None where this is the only rank.
        error: Error of what does not fit on this rank; None where all fits.
    """
    if collectives is None or collectives.size == 1:
        if error is not None:
            raise error
        return
    told: list[str | None] = collectives.all_gather_object(None if error is None else str(error))
    ranks = [rank for rank, one in enumerate(told) if one is not None]
    if not ranks:
        return
    where = "" if len(ranks) == len(told) else f"On rank {ranks[0]}: "
    kind = type(error) if error is not None else CheckpointError
    raise kind(f"{where}{told[ranks[0]]}") from error


@contextmanager
def failing_together(collectives: Collectives | None) -> Iterator[None]:
    """Raise on every rank if reading or writing a checkpoint inside has failed on some.

    A rank on which something else than a CheckpointError was raised raises that.

    Args:
        collectives: Group of all ranks, each of which must enter; None where this is the only rank.
    """
    told: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        told = error
    except Exception as error:  # a plugin's may be any
        with suppress(CheckpointError):
            agree_on_misfit(collectives, CheckpointError(f"{type(error).__name__}: {error}"))
        raise
    agree_on_misfit(collectives, told)


class Resuming:
    """The checkpoint that a run is resumed from, until all of it is known to fit.

    Args:
        checkpoint: The full checkpoint.
        before: Snapshot of the module before the weights were loaded.
        lent: What parameters were lent then; None where all were copied.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        before: ModuleSnapshot,
        lent: LentValues | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._before: ModuleSnapshot | None = before
        self._lent = lent

    def check(
        self, misfits: Callable[[Mapping[str, Any]], list[str]], collectives: Collectives
    ) -> None:
        """Restore the module and raise if the checkpoint does not fit on some rank.

        If it fits, the values that the module had are let go of.

        Args:
            misfits: Returns the misfits of a checkpoint on this rank, as messages.
            collectives: Group of all ranks, each of which must call.
        """
        try:
            agree_on_misfit(collectives, error_of(misfits(self._checkpoint)))
        except CheckpointError:
            assert self._before is not None
            self._before.restore_values()
            if self._lent is not None:
                self._lent.give_back()
            raise
        self._before = None
        if self._lent is not None:
            self._lent.forget_own()


def error_of(misfits: Sequence[str]) -> CheckpointError | None:
    """Return the error with these misfits; None if there are none."""
    return misfit_error("this run", misfits, _ADVICE) if misfits else None


def run_misfits(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    kept: Mapping[str, Any],
    scaler: GradScaler | None,
    scaler_state: Any,
    engine: DataParallelEngine | None,
) -> list[str]:
    """Return the misfits of all but the weights, once there are optimizers.

    Args:
        checkpoint: The full checkpoint.
        module: The model that the run trains.
        optimizers: All optimizers of the model.
        kept: The checkpoint's section of this package's strategies.
        scaler: The loss scaler; None where none is used.
        scaler_state: The checkpoint's state of a loss scaler; None where it has none.
        engine: The engine that has the parameters in shards; None before there is one.
    """
    shapes = {
        param: (name, param.shape if engine is None else engine.full_shape(param))
        for name, param in module.named_parameters()
    }
    return [
        *_states_misfits(checkpoint["optimizer_states"], optimizers, shapes),
        *kept_misfits(kept, dict(shapes.values())),
        *_scaler_misfits(scaler_state, scaler),
    ]


def _states_misfits(
    states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Optimizer],
    named_shapes: Mapping[nn.Parameter, tuple[str, Sequence[int]]],
) -> list[str]:
    """Return the misfits of the states of all optimizers."""
    if len(states) != len(optimizers):
        return [
            f"the checkpoint holds the state of {len(states)} optimizers, expected "
            f"{len(optimizers)} as configure_optimizers returns"
        ]
    return [
        misfit
        for optimizer, state in zip(optimizers, states, strict=True)
        for misfit in optimizer_misfits(state, optimizer, named_shapes)
    ]


def _scaler_misfits(state: Any, scaler: GradScaler | None) -> Iterator[str]:
    """Yield the misfits of a loss scaler's saved state."""
    if scaler is None or state is None:
        return
    if not isinstance(state, Mapping):
        yield f"the loss scaler's state is a {type(state).__name__}, expected a dictionary"
        return
    for key in scaler.state_dict().keys() - state.keys():
        yield f"the loss scaler's state has no {key!r}, expected a number"
    for key, value in state.items():
        if not isinstance(value, (int, float)):
            yield f"the loss scaler's {key!r} is a {type(value).__name__}, expected a number"
