"""A folder of torch.distributed.checkpoint as one checkpoint of Lightning's, with unread tensors.

`state_dict` (or FSDP's `model`) are the weights, `optimizer_<i>` the optimizers, by name; a folder
of `dcp.save` without these has its tensors as weights.
"""

from collections.abc import Mapping
from typing import Any

from lightning_shard.checkpoint.conversion.unread import is_unread
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.entries import (
    nothing_kept,
    optimizer_entry,
    roots_of,
)
from lightning_shard.checkpoint.sharded.folder import StoredFolder
from lightning_shard.checkpoint.sharded.rank_entries import stored_entries
from lightning_shard.errors import CheckpointError

_OTHERS_OPTIMIZERS = ("optimizer", "optim", "optimizers")
_OTHERS_STATE = (*_OTHERS_OPTIMIZERS, "lr_scheduler", "lr_schedulers", "dataloader", "train_state")


def folder_checkpoint(
    folder: StoredFolder, meta: Mapping[str, Any], *, weights_only: bool
) -> dict[str, Any]:
    """Return a folder's checkpoint; no tensor is read.

    Args:
        folder: The folder to read from.
        meta: What Lightning keeps besides; empty where it has kept nothing.
        weights_only: Whether optimizers are left out, whoever has written them.

    Raises:
        CheckpointError: It has an optimizer in a form that cannot be told from its names.
    """
    weights, states, others = roots_of(folder)
    checkpoint = {**nothing_kept(), **meta}
    if weights is None:
        names = [root for root in others if root.partition(".")[0] not in _OTHERS_STATE]
        checkpoint["state_dict"] = _flat({root: folder.nested(root) for root in names}, "")
        others = [root for root in others if root not in names]
    else:
        checkpoint["state_dict"] = folder.nested(weights)
    states += [root for root in others if root in _OTHERS_OPTIMIZERS]
    if weights_only:
        return checkpoint
    if states:
        checkpoint["optimizer_states"] = [
            numbered(optimizer_entry(folder, root), folder.path) for root in states
        ]
    if CHECKPOINT_KEY in folder.roots:
        kept = stored_entries(folder)
        checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), **kept}
    checkpoint |= {root: folder.nested(root) for root in others if root not in states}
    return checkpoint


def numbered(state: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Return an optimizer's state by the numbers that torch gives its parameters.

    Args:
        state: By name or by number.
        path: The checkpoint, for errors.

    Raises:
        CheckpointError: Its groups do not list its parameters.
    """
    numbers: dict[Any, int] = {}
    groups = []
    for group in state["param_groups"]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise _unknown_form(path)
        own = list(group["params"])
        numbers |= {name: len(numbers) + at for at, name in enumerate(own)}
        groups.append({**group, "params": [numbers[name] for name in own]})
    if not groups and (state["state"] or len(state) > 2):  # flattened, as torchtitan saves it
        raise _unknown_form(path)
    entries = {numbers.get(name, name): one for name, one in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _unknown_form(path: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} holds an optimizer's state without groups that list its parameters, expected "
        f"those of torch's get_optimizer_state_dict. Give --weights-only for the weights alone."
    )


def _flat(nested: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return tensors by the path of their keys; other values are no weights."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if is_unread(value):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
    return found
