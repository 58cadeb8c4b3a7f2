"""Gives the caller's model and trainer a survivor's results when rank 0 on them is lost.

    thread 0  model, trainer ──✗ dropped                     ┌──> weights, optimizers, progress,
    thread 1  their copies   ─────────── trains on ── ends ──┘    metrics: the caller's now

The caller's model, its submodules, strategy and trainer stay the objects that they are. The
parameters are the survivor's, as its optimizers and schedulers refer to them. What hooks have set
on a copy of the model, of a callback or of the data module is set on the caller's: see
`adopted_attributes`.
"""

from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_shard.errors import RankFailedError
from lightning_shard.launchers._lightning import (
    copy_metrics,
    copy_progress,
    exchange_strategy,
    take_down,
)
from lightning_shard.launchers.adopted_attributes import give_attributes
from lightning_shard.launchers.replicas import Replica, find_owners


def adopt(
    survivor: Replica,
    trainer: "pl.Trainer | None",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_ended_well: bool,
) -> None:
    """Give the originals, on which a rank ran that did not come to the end, a survivor's results.

    Args:
        survivor: Copies on which the lowest rank of the last generation ran.
        trainer: The caller's trainer; None without one.
        args: Positional arguments of the launched function, the caller's model among them.
        kwargs: Keyword arguments of the launched function.
        has_ended_well: Whether the rank on the originals returned, rather than be cut off.
    """
    if trainer is not None and not has_ended_well:
        take_down(trainer, RankFailedError("Rank 0 was lost; the others went on without it."))
    originals = find_owners(trainer, args, kwargs)
    for name, owner in find_owners(survivor.trainer, survivor.args, survivor.kwargs).items():
        original = originals.get(name)
        if isinstance(owner, nn.Module) and isinstance(original, nn.Module):
            _give_tensors(owner, original)
    give_attributes(survivor, trainer, originals)
    if trainer is not None and survivor.trainer is not None:
        _give_results(survivor.trainer, trainer)


def _give_tensors(source: nn.Module, target: nn.Module) -> None:
    """Give a module the parameters and buffers of another that is built alike."""
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        setattr(target, name, parameter)
    for name, buffer in source.named_buffers(recurse=False, remove_duplicate=False):
        setattr(target, name, buffer)
    for name, child in source.named_children():
        mine = getattr(target, name, None)
        if isinstance(mine, type(child)):
            _give_tensors(child, mine)
        else:  # made in a hook that the target has not come to
            setattr(target, name, child)


def _give_results(source: "pl.Trainer", target: "pl.Trainer") -> None:
    """Give a trainer the strategy, metrics, progress and callbacks' state of another."""
    exchange_strategy(source, target)
    copy_metrics(source, target)
    copy_progress(source.fit_loop, target.fit_loop)
    for callback, mine in zip(source.callbacks, target.callbacks, strict=False):  # type: ignore[attr-defined]
        if state := callback.state_dict():
            mine.load_state_dict(state)
    target.should_stop = source.should_stop
    target.state.status, target.state.stage = source.state.status, source.state.stage
