"""Gives the caller's model and trainer a survivor's results when rank 0 on them is lost.

    thread 0  model, trainer ──✗ dropped                     ┌──> weights, optimizers, progress,
    thread 1  their copies   ─────────── trains on ── ends ──┘    metrics: the caller's now

The caller's model, strategy and trainer stay the objects that they are. The parameters are the
survivor's, as its optimizers refer to them. What hooks have set on a copy of the model, a callback
or the data module is set on the caller's; containers are filled anew, so that whoever holds one
sees it. What torch and Lightning keep in a module stays the original's.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.environments.launchers import _lightning
from lightning_shard.environments.launchers._copy import copy_with_functions
from lightning_shard.environments.launchers.replicas import (
    Replica,
    find_owners,
    memo_of,
    modules_of,
)
from lightning_shard.errors import RankFailedError


def adopt(
    survivor: Replica,
    trainer: "pl.Trainer | None",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_ended_well: bool,
) -> None:
    """Give the originals, on which a lost rank ran, a survivor's results."""
    if trainer is not None and not has_ended_well:
        _lightning.take_down(
            trainer, RankFailedError("Rank 0 was lost; the others went on without it.")
        )
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
    _lightning.exchange_strategy(source, target)
    _lightning.copy_metrics(source, target)
    _lightning.copy_progress(source.fit_loop, target.fit_loop)
    for callback, mine in zip(source.callbacks, target.callbacks, strict=False):  # type: ignore[attr-defined]
        if state := callback.state_dict():
            mine.load_state_dict(state)
    target.should_stop = source.should_stop
    target.state.status, target.state.stage = source.state.status, source.state.stage


OF_LIGHTNING = frozenset({*vars(pl.LightningModule()), *vars(pl.LightningDataModule())})


def give_attributes(
    survivor: Replica, trainer: "pl.Trainer | None", originals: Mapping[str, Any]
) -> None:
    """Give the originals the attributes of what a survivor ran on; parameters are shared."""
    owners = find_owners(survivor.trainer, survivor.args, survivor.kwargs)
    pairs = [pair for name, owner in owners.items() for pair in _pairs(owner, originals.get(name))]
    memo = memo_of(survivor.trainer, owners, (survivor.args, survivor.kwargs))
    memo.update({id(source): target for source, target in pairs})
    if trainer is not None and survivor.trainer is not None:
        memo.update(_lightning.copied_objects(survivor.trainer, trainer))
    modules = modules_of(owners)
    for module in modules:
        memo.update({id(one): one for one in (*module.parameters(), *module.buffers())})
    others = [source for source, _ in pairs] + [survivor.trainer]
    for source, target in pairs:
        for name, value in _attributes(source):
            about = f"{type(source).__name__}.{name}"
            put(vars(target), name, _copied(value, about, memo, modules, others))
        if isinstance(source, (pl.LightningModule, pl.LightningDataModule)):
            about = f"{type(source).__name__}.hparams"
            target.hparams.update(_copied(dict(source.hparams), about, memo, modules, others))


def _pairs(source: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an owner and its parts, each with the original that it is a copy of."""
    if type(source) is not type(target) or source is target:
        return
    if not isinstance(source, nn.Module):
        yield source, target
        return
    mine = dict(target.named_modules())
    for path, part in source.named_modules():
        if path in mine and type(part) is type(mine[path]) and part is not mine[path]:
            yield part, mine[path]


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    skipped = OF_LIGHTNING if isinstance(owner, (nn.Module, pl.LightningDataModule)) else ()
    return [(name, value) for name, value in vars(owner).items() if name not in skipped]


def _copied(
    value: Any, about: str, memo: dict[int, Any], modules: list[nn.Module], others: Any
) -> Any:
    try:
        return copy_with_functions(value, memo, modules, others)
    except TypeError:  # what Python cannot copy, a lock say, is in nobody's hands any more
        return value
    except Exception as error:
        rank_zero_warn(
            f"{about} is, after this elastic fit, that of a rank that went on to the end, and what "
            f"it refers to of that rank's model, too: its copy raised {type(error).__name__} "
            f"({error}). Set what can be copied there in on_train_end, a detached tensor say."
        )
        return value


def put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; what is in a container changes in place, since others may hold it."""
    present: Any = attributes.get(name)
    is_container = isinstance(present, (list, deque, dict, set))
    if not is_container or type(present) is not type(value) or present is value:
        attributes[name] = value
        return
    present.clear()
    fill = present.extend if isinstance(present, (list, deque)) else present.update
    fill(value)
