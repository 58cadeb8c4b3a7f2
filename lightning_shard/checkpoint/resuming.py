"""Resuming from a checkpoint, all of which is checked before the run holds any of it.

    load_model_state_dict    weights are loaded, by the module's own hooks; the old ones are kept
    setup                    the optimizers are made: their state is checked, and the state of
                             compression, local SGD and the loss scaler; if it does not fit, the
                             old weights are restored
    on_fit_start             hooks may give the optimizers other groups (BaseFinetuning gives
                             those of the run that was saved): what has changed is checked again
    then                     shards are cut, and everything is loaded

Weights come first since hooks of the module may change it by what they find in a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.by_rank import entries_of_ranks, outline
from lightning_shard.checkpoint.full import MappedParameters, ModuleSnapshot
from lightning_shard.checkpoint.misfits import (
    kind_of,
    misfit_error,
    optimizer_misfits,
    shape_misfits,
)
from lightning_shard.checkpoint.random_state import random_misfit
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import CheckpointError

_ADVICE = (
    "Resume with the model, the optimizers and the settings that it was saved with, or load only "
    "the weights."
)


def agree_on_misfit(collectives: Collectives | None, error: CheckpointError | None) -> None:
    """Raise the same CheckpointError on every rank if a checkpoint does not fit on some."""
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
    """Raise on every rank if reading or writing a checkpoint inside has failed on some."""
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
    """The checkpoint that a run is resumed from, and what undoes it, until all is known to fit."""

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        before: ModuleSnapshot,
        lent: MappedParameters | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._before: ModuleSnapshot | None = before
        self._lent = lent
        self._checked: list[list[int]] | None = None  # the groups of parameters that fit

    def check(
        self,
        misfits: Callable[[Mapping[str, Any]], list[str]],
        collectives: Collectives,
        optimizers: Sequence[Optimizer],
        *,
        may_change: bool,
    ) -> None:
        """Restore the module and raise if the checkpoint misfits on some rank; each must call."""
        found = misfits(self._checkpoint)
        if not found:
            self._checked = _groups(optimizers)
        elif may_change:
            found = misfits({**self._checkpoint, "optimizer_states": None})
        try:
            agree_on_misfit(collectives, error_of(found))
        except CheckpointError:
            assert self._before is not None
            self._before.restore_values()
            if self._lent is not None:
                self._lent.give_back()
            raise
        self._before = None
        if self._lent is not None:
            self._lent.forget_own()

    def has_checked(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether the optimizers' groups are those that were found to fit."""
        return self._checked == _groups(optimizers)


def _groups(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    return [[id(param) for param in g["params"]] for one in optimizers for g in one.param_groups]


def error_of(misfits: Sequence[str], *loaded: str) -> CheckpointError | None:
    """Return the error with these misfits; None if there are none."""
    return misfit_error("this run", misfits, _ADVICE, *loaded) if misfits else None


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
    """Return the misfits of all but the weights, once there are optimizers."""
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


_Shapes = Mapping[str, Any]  # full shapes by parameter name

_OF_LOCAL_SGD = {"own", "common", "arriving", "outer", "compression"}
_OF_ONE_RANK = {"parameters", "buffers", "compression"}  # of local SGD
_OF_GRADIENTS = {"residual", "momentum"}  # of what compression keeps; PowerSGD's q is shaped by it
# entries of an optimizer
_OF_ELEMENTS = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def kept_misfits(kept: Mapping[str, Any], shapes: _Shapes) -> Iterator[str]:
    """Yield the misfits of the state that only these strategies keep, of all ranks' entries."""
    yield from _compression_misfits(kept.get("compression") or {}, shapes)
    yield from _local_misfits(kept, shapes)
    for rank, stored in entries_of_ranks(kept):
        whose, entry = f"{rank}'s ", outline(stored)
        if not isinstance(entry, Mapping):
            yield f"{whose}entry is a {type(entry).__name__}, expected a dictionary"
            continue
        yield from _compression_misfits(entry.get("compression") or {}, shapes, whose)
        yield from _own_misfits(entry, shapes, whose)
        yield from _stream_misfits(entry, whose)


def _local_misfits(kept: Mapping[str, Any], shapes: _Shapes) -> Iterator[str]:
    """Yield the misfits of what local SGD keeps for all ranks."""
    local = kept.get("local_sgd")
    if not local:
        return
    lacking = sorted(_OF_LOCAL_SGD - local.keys())
    if lacking:
        yield f"what local SGD keeps has no {lacking}, expected {sorted(_OF_LOCAL_SGD)}"
        return
    yield from _tensor_misfits("the own value", local["own"], shapes)
    yield from _tensor_misfits("the common value", local["common"], shapes)
    yield from _compression_misfits(local["compression"] or {}, shapes)
    for flight in local["arriving"]:
        yield from _tensor_misfits("the mean on its way", flight["mean"], shapes)
    yield from _state_misfits("the outer ", local["outer"].get("state", {}), shapes)


def _own_misfits(entry: Mapping[str, Any], shapes: _Shapes, whose: str) -> Iterator[str]:
    """Yield the misfits of what local SGD keeps for one rank."""
    local = entry.get("local_sgd")
    if not local:
        return
    if lacking := sorted(_OF_ONE_RANK - local.keys()):
        yield f"{whose}local SGD has no {lacking}, expected {sorted(_OF_ONE_RANK)}"
        return
    yield from _tensor_misfits(f"{whose}own value", local["parameters"], shapes)
    yield from _compression_misfits(local["compression"], shapes, whose)
    for state in entry.get("optimizers", ()):
        yield from _state_misfits(whose, state, shapes)


def _state_misfits(whose: str, state: Mapping[str, Any], shapes: _Shapes) -> Iterator[str]:
    for name, entries in state.items():
        for key in _OF_ELEMENTS & entries.keys():
            yield from _tensor_misfits(f"{whose}optimizer's {key}", {name: entries[key]}, shapes)


def _stream_misfits(entry: Mapping[str, Any], whose: str) -> Iterator[str]:
    data = entry.get("data") or {}
    for when in (entry.get("random"), data.get("iterators"), data.get("order")):
        if when and (found := random_misfit(when)) is not None:
            yield f"{whose}random streams: {found}"


def _compression_misfits(
    state: Mapping[str, Any], shapes: _Shapes, whose: str = ""
) -> Iterator[str]:
    for kind in _OF_GRADIENTS & state.keys():
        yield from _tensor_misfits(f"{whose}compression's {kind}", state[kind], shapes)
    for name, value in state.get("owned", {}).items():
        most = prod(shapes.get(name, ()))
        if isinstance(value, Tensor) and name in shapes and value.numel() > most:
            yield (
                f"{whose}compression's owned part of {name!r} has {value.numel()} elements, "
                f"expected at most {most}"
            )


def _tensor_misfits(what: str, tensors: Any, shapes: _Shapes) -> Iterator[str]:
    if not isinstance(tensors, Mapping):
        yield f"{what} is a {type(tensors).__name__}, expected tensors by name"
        return
    for name, value in tensors.items():
        if name not in shapes or value is None:
            continue
        if not isinstance(value, Tensor):
            yield f"{what} of {name!r} is a {type(value).__name__}, expected a tensor"
        elif found := shape_misfits(f"{what} of {name!r}", value.shape, shapes[name]):
            yield from found
        elif kind_of(value.dtype) == "integer":
            yield f"{what} of {name!r} is of {value.dtype}, expected floating-point numbers"
