"""What hooks have set on a survivor's model, callbacks and data module, for the caller's own.

    survivor's copy   model.losses = [...], callback.best = 0.3     set in on_train_end, say
                          │ copied; what is in it of the survivor's run becomes the caller's
    the original      model.losses, callback.best

A list, dictionary or set that the original has is filled anew, so that whoever holds it sees it.
What torch and Lightning keep in a module stays the original's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.launchers._copy import copy_with_functions
from lightning_shard.launchers._lightning import copied_objects
from lightning_shard.launchers.replicas import Replica, find_owners, memo_of, modules_of

_OF_LIGHTNING = frozenset({*vars(pl.LightningModule()), *vars(pl.LightningDataModule())})


def give_attributes(
    survivor: Replica, trainer: "pl.Trainer | None", originals: Mapping[str, Any]
) -> None:
    """Give the originals the attributes of what a survivor ran on; parameters are the same already.

    Args:
        survivor: What the lowest rank of the last generation ran.
        trainer: The caller's, if there is one.
        originals: The caller's objects by name, as `find_owners` gives them.
    """
    owners = find_owners(survivor.trainer, survivor.args, survivor.kwargs)
    pairs = [pair for name, owner in owners.items() for pair in _pairs(owner, originals.get(name))]
    memo = memo_of(survivor.trainer, owners, (survivor.args, survivor.kwargs))
    memo.update({id(source): target for source, target in pairs})
    if trainer is not None and survivor.trainer is not None:
        memo.update(copied_objects(survivor.trainer, trainer))
    modules = modules_of(owners)
    for module in modules:
        memo.update({id(one): one for one in (*module.parameters(), *module.buffers())})
    others = [source for source, _ in pairs] + [survivor.trainer]
    for source, target in pairs:
        for name, value in _attributes(source):
            about = f"{type(source).__name__}.{name}"
            _give(target, name, _copied(value, about, memo, modules, others))
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
    skipped = _OF_LIGHTNING if isinstance(owner, (nn.Module, pl.LightningDataModule)) else ()
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


def _give(target: Any, name: str, value: Any) -> None:
    mine = vars(target).get(name)
    if type(mine) is not type(value) or mine is value:
        vars(target)[name] = value
    elif isinstance(mine, list):
        mine[:] = value
    elif type(mine) in (dict, set):
        mine.clear()
        mine.update(value)
    else:
        vars(target)[name] = value
