"""Whose folder it is: where its weights are, its optimizers' states, and all else.

    state_dict.…, optimizer_0.…       this package, Lightning's strategies (FSDP calls it "model")
    model.…, optimizer.…              a loop around FSDP2
    app.model.…, app.optim.…          the same, saved as one object
    layers.0.…, optimizer.state.…     torchtitan: weights by their own names, states flattened
    layers.0.…                        `dcp.save(model.state_dict(), ...)`

Nothing but values that are no tensors is read here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor

_NUMBERED = "optimizer_"
_WEIGHTS = ("state_dict", "model")  # as the strategies call them
_OPTIMIZER = ("optimizer", "optim", "optimizers")  # as loops call one, or a list of them
_NO_WEIGHTS = {*_OPTIMIZER, "lr_scheduler", "lr_schedulers", "dataloader", "train_state"}
_OF_FLATTENED = ("state.", "param_groups.")


class FolderParts(NamedTuple):
    """What is where in a folder, with tensors that are not read.

    Attributes:
        weights: Tensors and other values of the module, by name.
        optimizers: States of optimizers, each with "state" and "param_groups", or flattened.
        others: Everything else by its root, but for what ranks keep.
    """

    weights: dict[str, Any]
    optimizers: list[dict[str, Any]]
    others: dict[str, Any]


def parts_of(folder: StoredFolder) -> FolderParts:
    """Take a folder apart, whoever has written it."""
    roots = {root: folder.nested(root) for root in folder.roots if root != CHECKPOINT_KEY}
    if len(roots) == 1 and not any(map(_is_known, roots)):
        (inner,) = roots.values()
        if isinstance(inner, Mapping) and any(root in inner for root in _WEIGHTS):
            roots = dict(inner)
    weights = next((root for root in _WEIGHTS if root in roots), None)
    if weights is not None:
        found = roots.pop(weights)
        states = _optimizers(roots)
        return FolderParts(found, states, roots)
    states = _optimizers(roots)
    loose = {} if states and CHECKPOINT_KEY in folder.roots else _loose(roots)
    return FolderParts(loose, states, roots)


def _is_known(root: str) -> bool:
    return root in _WEIGHTS or root in _NO_WEIGHTS or root.startswith(_NUMBERED)


def _optimizers(roots: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the optimizers' states out of roots, and return them in order."""
    names = sorted((one for one in roots if one.startswith(_NUMBERED)), key=_number)
    if not names:
        names = [one for one in _OPTIMIZER if one in roots][:1]
    states: list[dict[str, Any]] = []
    for name in names:
        found = roots.pop(name)
        states += found if isinstance(found, list) else [found]
    return [
        one if is_flattened(one) else {"state": {}, "param_groups": [], **one} for one in states
    ]


def _number(root: str) -> int:
    digits = root.removeprefix(_NUMBERED)
    return int(digits) if digits.isdigit() else 0


def _loose(roots: dict[str, Any]) -> dict[str, Any]:
    """Take tensors that lie at the top out of roots, and return them by the path of their keys."""
    names = [root for root in roots if root.partition(".")[0] not in _NO_WEIGHTS]
    found = _flat({name: roots[name] for name in names}, "")
    for name in names:
        if isinstance(roots[name], StoredTensor | Mapping) and _flat({name: roots[name]}, ""):
            del roots[name]
    return found


def _flat(nested: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return tensors by the path of their keys; other values are no weights."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, StoredTensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
    return found


# --- flattened states -----------------------------------------------------------------------------


def is_flattened(state: Mapping[str, Any]) -> bool:
    """Whether a state has torch's flattened form.

    Source:
        `StateDictOptions(flatten_optimizer_state_dict=True)` of torch, whose keys are
        "state.<name>.<key>" and "param_groups.<name>.<option>".
    """
    keys = [str(key) for key in state]
    return bool(keys) and all(key.startswith(_OF_FLATTENED) for key in keys)


def by_parameter(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state as one by names, with a group for each parameter."""
    nested: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in state.items():
        part, _, path = str(key).partition(".")
        name, _, what = path.rpartition(".")
        nested[part].setdefault(name, {})[what] = value
    groups = [{**options, "params": [name]} for name, options in nested["param_groups"].items()]
    return {"state": nested["state"], "param_groups": groups, "ungrouped": True}
