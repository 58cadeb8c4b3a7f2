"""Which entry of Lightning's checkpoint goes where in a folder, and back.

"state_dict", averages of it     boxes under the same name
"optimizer_states"[i]            `optimizer_<i>`, by the parameters' names
what each rank keeps             `lightning_shard.rank_<i>`
everything else                  meta.pt

What others call these is in `folder_parts`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_all
from lightning_shard.checkpoint.sharded.folder_parts import by_parameter, is_flattened, parts_of
from lightning_shard.checkpoint.sharded.named_optimizers import named_state
from lightning_shard.checkpoint.sharded.rank_entries import (
    OnDemand,
    stored_entries,
    take_out_entries,
)

_OPTIMIZER = "optimizer_"


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
    weights, states, others = parts_of(folder)
    checkpoint = {**nothing_kept(), "lr_schedulers": [], "callbacks": {}, **folder.meta()}
    checkpoint["state_dict"] = read_all(weights) if in_full else weights
    if states:
        checkpoint["optimizer_states"] = [
            by_parameter(one) if is_flattened(one) else one for one in states
        ]
    if CHECKPOINT_KEY in folder.roots:
        kept = {name: OnDemand(entry) for name, entry in stored_entries(folder).items()}
        checkpoint[CHECKPOINT_KEY] = {**checkpoint.get(CHECKPOINT_KEY, {}), **kept}
    return checkpoint | {root: read_all(nested) for root, nested in others.items()}


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
