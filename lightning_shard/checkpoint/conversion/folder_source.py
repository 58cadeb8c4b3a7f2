"""A folder of torch.distributed.checkpoint as a checkpoint of Lightning's, with unread tensors."""

from collections.abc import Mapping
from typing import Any

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.entries import nothing_kept
from lightning_shard.checkpoint.sharded.folder import StoredFolder
from lightning_shard.checkpoint.sharded.folder_parts import is_flattened, parts_of
from lightning_shard.checkpoint.sharded.rank_entries import stored_entries
from lightning_shard.errors import CheckpointError


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
    weights, states, others = parts_of(folder)
    checkpoint = {**nothing_kept(), **meta, "state_dict": weights}
    if weights_only:
        return checkpoint
    if states:
        checkpoint["optimizer_states"] = [numbered(one, folder.path) for one in states]
    if CHECKPOINT_KEY in folder.roots:
        kept = stored_entries(folder)
        checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), **kept}
    return checkpoint | others


def numbered(state: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Return an optimizer's state by the numbers that torch gives its parameters.

    Args:
        state: By name or by number.
        path: The checkpoint, for errors.

    Raises:
        CheckpointError: Its groups do not list its parameters.
    """
    if is_flattened(state):  # as torchtitan saves it
        raise _unknown_form(path)
    numbers: dict[Any, int] = {}
    groups = []
    for group in state["param_groups"]:
        if not isinstance(group, Mapping) or "params" not in group:
            raise _unknown_form(path)
        own = list(group["params"])
        numbers |= {name: len(numbers) + at for at, name in enumerate(own)}
        groups.append({**group, "params": [numbers[name] for name in own]})
    if not groups and (state["state"] or len(state) > 2):
        raise _unknown_form(path)
    entries = {numbers.get(name, name): one for name, one in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _unknown_form(path: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} holds an optimizer's state without groups that list its parameters, expected "
        f"those of torch's get_optimizer_state_dict. Give --weights-only for the weights alone."
    )
