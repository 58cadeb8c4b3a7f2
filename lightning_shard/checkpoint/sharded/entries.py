"""Which entry of Lightning's checkpoint goes where in a folder, and back.

"state_dict", averages of it     boxes under the same name; other tools call the first "model"
"optimizer_states"[i]            `optimizer_<i>`, by the parameters' names
what each rank keeps             `lightning_shard.rank_<i>`
everything else                  meta.pt
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_all
from lightning_shard.checkpoint.sharded.named_optimizers import named_state
from lightning_shard.checkpoint.sharded.rank_entries import (
    OnDemand,
    stored_entries,
    take_out_entries,
)

_OPTIMIZER = "optimizer_"
_WEIGHTS = ("state_dict", "model")  # as the strategies call them


class Roots(NamedTuple):
    """The names under which a folder holds what, see `StoredFolder.nested`.

    Attributes:
        weights: Name of the module's weights; None where there are none by a known name.
        optimizers: Names of the optimizers' states, in order.
        others: All other names, but for what ranks keep.
    """

    weights: str | None
    optimizers: list[str]
    others: list[str]


def roots_of(folder: StoredFolder) -> Roots:
    """Take the names of a folder apart."""
    weights = next((root for root in _WEIGHTS if root in folder.roots), None)
    optimizers = sorted((one for one in folder.roots if one.startswith(_OPTIMIZER)), key=_number)
    known = {weights, CHECKPOINT_KEY, *optimizers}
    others = [one for one in folder.roots if one not in known]
    return Roots(weights, optimizers, others)


def _number(root: str) -> int:
    digits = root.removeprefix(_OPTIMIZER)
    return int(digits) if digits.isdigit() else 0


def optimizer_entry(folder: StoredFolder, root: str) -> dict[str, Any]:
    """Return an optimizer's state as a folder has it, with tensors that are not read."""
    return {"state": {}, "param_groups": [], **folder.nested(root)}


def nothing_kept() -> dict[str, Any]:
    """Return what Lightning asks of a checkpoint, for weights that come without it."""
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning_version(),
        "state_dict": {},
    }


@cache
def lightning_version() -> str:
    """Return the version of the Lightning that is installed."""
    for name in ("lightning", "pytorch-lightning"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "2.6.0"


def checkpoint_of(folder: StoredFolder, *, in_full: bool) -> dict[str, Any]:
    """Return a folder's checkpoint for a run; optimizers' states are not read.

    Args:
        folder: The folder to read from.
        in_full: Whether weights are read, full.
    """
    roots = roots_of(folder)
    weights = {} if roots.weights is None else folder.nested(roots.weights)
    checkpoint = {**nothing_kept(), "lr_schedulers": [], "callbacks": {}, **folder.meta()}
    checkpoint["state_dict"] = read_all(weights) if in_full else weights
    if roots.optimizers:
        checkpoint["optimizer_states"] = [optimizer_entry(folder, one) for one in roots.optimizers]
    if CHECKPOINT_KEY in folder.roots:
        kept = {name: OnDemand(entry) for name, entry in stored_entries(folder).items()}
        checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), **kept}
    return checkpoint | {root: read_all(folder.nested(root)) for root in roots.others}


def folder_entries(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    names: Mapping[nn.Parameter, str],
    *,
    keeps: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what this rank writes into a folder, and what is left of a checkpoint for meta.pt.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's boxes and its own entry.
        optimizers: The optimizers whose states it has.
        names: Name of each parameter.
        keeps: Whether this rank writes what is no box, too.
    """
    meta, state = dict(checkpoint), dict[str, Any]()
    own: dict[str, Any] = {}
    if CHECKPOINT_KEY in meta:
        meta[CHECKPOINT_KEY] = section = dict(meta[CHECKPOINT_KEY])
        own = take_out_entries(section)
    for number, one in enumerate(meta.pop("optimizer_states", ())):
        state[f"{_OPTIMIZER}{number}"] = named_state(one, optimizers[number], names)
    for name, entries in checkpoint.items():
        if name in meta and _is_of_weights(name, entries):
            state[name] = {
                key: value
                for key, value in meta.pop(name).items()
                if keeps or isinstance(value, BoxedTensor)
            }
    if own:  # last: torch shares out what several ranks have in this order
        state[CHECKPOINT_KEY] = own
    return state, meta


def _is_of_weights(name: str, entries: Any) -> bool:
    if name == "state_dict":
        return True
    return isinstance(entries, Mapping) and any(
        isinstance(one, BoxedTensor) for one in entries.values()
    )
