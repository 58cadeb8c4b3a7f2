"""Which entry of Lightning's checkpoint goes where in a folder, and back.

"state_dict", averages of it     boxes under the same name
"optimizer_states"[i]            `optimizer_<i>`, by the parameters' names
what each rank keeps             `lightning_shard.rank_<i>`: its outline, and each tensor of it
everything else                  meta.pt

Others have other names for these:

state_dict.…, optimizer_0.…       this package, Lightning's strategies (FSDP calls it "model")
model.…, optimizer.…              a loop around FSDP2
app.model.…, app.optim.…          the same, saved as one object
layers.0.…, optimizer.state.…     torchtitan: weights by their own names, states flattened
layers.0.…                        `dcp.save(model.state_dict(), ...)`
"""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.by_rank import entries_of_ranks
from lightning_shard.checkpoint.misfits import length_misfits
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor, read_all
from lightning_shard.checkpoint.unread import exchanged
from lightning_shard.data_parallel.compression.state import ReadWhenAsked
from lightning_shard.data_parallel.optimizer_entries import flattened
from lightning_shard.data_parallel.torch_private import OF_ORIGINAL
from lightning_shard.errors import CheckpointError, some_of

# Optimizer states by the parameters' names, as folders have them, and by number, as torch does.
#
# {"state": {"head.weight": ...}, "param_groups": [{"lr": ..., "params": ["head.weight"]}]}
# {"state": {0: ...},             "param_groups": [{"lr": ..., "params": [0]}]}
#
# An optimizer takes the entries of a name for its own parameter of that name, whatever their order.


def named_state(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """Return a state by names."""
    if "param_groups" not in state or is_named(state):  # the groups come from one rank
        return dict(state)
    numbers = range(sum(len(group["params"]) for group in state["param_groups"]))
    named = {
        number: names[param]
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for number, param in zip(saved["params"], own["params"], strict=True)
        if param in names
    }
    return {
        "state": {
            named.get(key, key): one
            for key, one in state["state"].items()
            if key in named or key not in numbers
        },
        "param_groups": [
            {**group, "params": [named[number] for number in group["params"] if number in named]}
            for group in state["param_groups"]
        ],
    }


def is_named(state: Mapping[str, Any]) -> bool:
    """Whether a state lists its parameters by name."""
    groups = state.get("param_groups", ())
    listed = [name for group in groups for name in group.get("params", ())]
    return any(isinstance(name, str) for name in listed)


def numbered_state(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """Return a state by the numbers of an optimizer that has the same names; see `name_misfits`."""
    if not is_named(state):
        return dict(state)
    state = _renamed(state, {*names.values()})
    numbers: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    for group, own in zip(
        _groups_for(state, optimizer, names), optimizer.param_groups, strict=True
    ):
        first = len(numbers)
        numbers |= {names[param]: first + at for at, param in enumerate(own["params"])}
        groups.append({**group, "params": list(range(first, len(numbers)))})
    entries = {numbers.get(name, name): one for name, one in state.get("state", {}).items()}
    return {"state": entries, "param_groups": groups}


def _renamed(state: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """Return a state by the names from before or after `prune`, as the module has them now."""
    others = {
        other: name
        for name in own
        for other in (name.removesuffix(OF_ORIGINAL), name + OF_ORIGINAL)
        if other not in own
    }

    def renamed(name: str) -> str:
        return others.get(name, name)

    return {
        **state,
        "state": {renamed(name): one for name, one in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [*map(renamed, group["params"])]} for group in state["param_groups"]
        ],
    }


def name_misfits(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> list[str]:
    """Return as messages what makes the names of a state others than the optimizer's."""
    kind = type(optimizer).__name__
    if not is_named(state):
        return []
    state = _renamed(state, {*names.values()})
    own = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    if state.get("ungrouped"):
        return _ungrouped_misfits(state, own, kind)
    if found := length_misfits(state["param_groups"], optimizer):
        return found
    saved = [list(group["params"]) for group in state["param_groups"]]
    return [
        f"group {number} of the state of {kind} holds {_some(set(theirs) - set(ours))}, expected "
        f"{_some(set(ours) - set(theirs))}"
        for number, (theirs, ours) in enumerate(zip(saved, own, strict=True))
        if set(theirs) != set(ours)
    ]


def _groups_for(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Return a state's groups, or those of an optimizer put together of one for each parameter."""
    if not state.get("ungrouped"):
        return list(state["param_groups"])
    options = {group["params"][0]: group for group in state["param_groups"]}
    own = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    return [{**options[group[0]], "params": group} if group else {"params": []} for group in own]


def _ungrouped_misfits(
    state: Mapping[str, Any], own: Sequence[Sequence[str]], kind: str
) -> list[str]:
    """Return what keeps a state without groups from being the state of these groups."""
    options = {
        group["params"][0]: {key: one for key, one in group.items() if key != "params"}
        for group in state["param_groups"]
    }
    expected = {name for group in own for name in group}
    if lacking := expected ^ options.keys():
        return [
            f"the state of {kind} is of {_some(set(options) & lacking)}, expected "
            f"{_some(expected & lacking)}"
        ]
    apart = [
        (group[0], name) for group in own for name in group if options[name] != options[group[0]]
    ]
    return [
        f"the state of {kind} has {options[one]} for {one!r} and {options[other]} for {other!r}, "
        f"expected the same for what is in one group"
        for one, other in apart[:1]
    ]


def _some(names: set[str]) -> str:
    return some_of(sorted(names)) or "no other parameter"


_OUTLINE = "_entry"


def take_out_entries(section: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Take the entries of ranks out of a section; return tensors for a folder, by rank and name."""
    entries = dict(entries_of_ranks(section))
    return {name: _packed(section.pop(name)) for name in entries}


def _packed(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def outline(tensor: Tensor, path: str) -> Tensor:
        found[_name(path, found)] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    file = io.BytesIO()
    torch.save(_with_each(entry, outline), file)
    return {_OUTLINE: torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8), **found}


def _with_each(nested: Any, change: Callable[[Tensor, str], Any], path: str = "") -> Any:
    """Return nested mappings and lists with what `change` makes of each tensor, by its path."""
    if isinstance(nested, Tensor):
        return change(nested, path)
    if isinstance(nested, Mapping):
        return {key: _with_each(one, change, f"{path}.{key}") for key, one in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [_with_each(one, change, f"{path}.{at}") for at, one in enumerate(nested)]
    return nested


def _name(path: str, taken: Mapping[str, Any]) -> str:
    """Return the name of the tensor at a path, which two paths with dots in them may share."""
    name = path.removeprefix(".")
    while name in taken:
        name += "'"
    return name


def stored_entries(folder: StoredFolder) -> dict[str, Any]:
    """Return the entries of a folder's ranks, with tensors that are not read."""
    packed: Mapping[str, Mapping[str, StoredTensor]] = folder.nested(CHECKPOINT_KEY)
    outlines = {name: one[_OUTLINE] for name, one in packed.items() if _OUTLINE in one}
    read = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in outlines.items()}
    folder.read({one.key: read[name] for name, one in outlines.items()})
    return {name: _unpacked(folder, name, read[name], packed[name]) for name in read}


def _unpacked(
    folder: StoredFolder, rank: str, outline: Tensor, tensors: Mapping[str, StoredTensor]
) -> Any:
    taken: dict[str, StoredTensor] = {}

    def stored(_: Tensor, path: str) -> StoredTensor:
        name = _name(path, taken)
        taken[name] = tensors[name]
        return tensors[name]

    entry = folder.unpickled(outline.numpy().tobytes(), f"What {rank} has kept")
    try:
        return _with_each(entry, stored)
    except KeyError as error:
        raise CheckpointError(
            f"The checkpoint {str(folder.path)!r} lacks {error} of what {rank} has kept, expected "
            f"all that its entry lists. Load another checkpoint."
        ) from error


class OnDemand(ReadWhenAsked):
    """An entry whose tensors are read when somebody asks for one, and not held."""

    def __init__(self, nested: Mapping[str, Any]) -> None:
        super().__init__(nested, lambda key: _asked_for(nested[key]))
        self._nested = nested

    @property
    def outline(self) -> dict[str, Any]:
        """The entry, with placeholders for tensors; nothing is read."""
        shapes: dict[str, Any] = exchanged(self._nested, StoredTensor.placeholder)
        return shapes


def _asked_for(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, Mapping):
        return OnDemand(value)
    if isinstance(value, list):
        return [_asked_for(one) for one in value]
    return value


_OPTIMIZER = "optimizer_"
_WEIGHTS = ("state_dict", "model")  # as the strategies call them
_OPTIMIZER_OF_LOOPS = ("optimizer", "optim", "optimizers")  # as loops call one, or a list of them
_NO_WEIGHTS = {*_OPTIMIZER_OF_LOOPS, "lr_scheduler", "lr_schedulers", "dataloader", "train_state"}
_OF_FLATTENED = ("state.", "param_groups.")


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
    """Return a folder's checkpoint for a run; optimizers' states are not read."""
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
    """Return what this rank writes into a folder, and what is left of a checkpoint for meta.pt."""
    meta, state = dict(checkpoint), dict[str, Any]()
    own: dict[str, Any] = {}
    if CHECKPOINT_KEY in meta:
        meta[CHECKPOINT_KEY] = section = dict(meta[CHECKPOINT_KEY])
        own = take_out_entries(section)
    for number, one in enumerate(meta.pop("optimizer_states", ())):
        state[f"{_OPTIMIZER}{number}"] = found = named_state(one, optimizers[number], names)
        if "state" in found:
            entries = found["state"].items()
            flat = {key: flattened(of) if isinstance(of, dict) else of for key, of in entries}
            found["state"] = flat
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


def parts_of(folder: StoredFolder) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Take a folder apart, whoever has written it: weights, states of optimizers, and the rest."""
    roots = {root: folder.nested(root) for root in folder.roots if root != CHECKPOINT_KEY}
    if len(roots) == 1 and not any(map(_is_known, roots)):
        (inner,) = roots.values()
        if isinstance(inner, Mapping) and any(root in inner for root in _WEIGHTS):
            roots = dict(inner)
    weights = next((root for root in _WEIGHTS if root in roots), None)
    if weights is not None:
        found = roots.pop(weights)
        states = _optimizers(roots)
        return found, states, roots
    states = _optimizers(roots)
    loose = {} if states and CHECKPOINT_KEY in folder.roots else _loose(roots)
    return loose, states, roots


def _is_known(root: str) -> bool:
    return root in _WEIGHTS or root in _NO_WEIGHTS or root.startswith(_OPTIMIZER)


def _optimizers(roots: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the optimizers' states out of roots, and return them in order."""
    names = sorted((one for one in roots if one.startswith(_OPTIMIZER)), key=_number)
    if not names:
        names = [one for one in _OPTIMIZER_OF_LOOPS if one in roots][:1]
    states: list[dict[str, Any]] = []
    for name in names:
        found = roots.pop(name)
        states += found if isinstance(found, list) else [found]
    return [
        one if is_flattened(one) else {"state": {}, "param_groups": [], **one} for one in states
    ]


def _number(root: str) -> int:
    digits = root.removeprefix(_OPTIMIZER)
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
    """Whether a state is one of torch's `flatten_optimizer_state_dict`."""
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
