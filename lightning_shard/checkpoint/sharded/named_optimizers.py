"""Optimizer states by the parameters' names, as folders have them, and by number, as torch does.

    {"state": {"head.weight": ...}, "param_groups": [{"lr": ..., "params": ["head.weight"]}]}
    {"state": {0: ...},             "param_groups": [{"lr": ..., "params": [0]}]}

An optimizer takes the entries of a name for its own parameter of that name, whatever their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import length_misfits
from lightning_shard.errors import some_of


def named_state(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """Return a state by names."""
    if "param_groups" not in state or is_named(state):  # the groups come from one rank
        return dict(state)
    named: dict[int, str] = {}
    numbers = range(sum(len(group["params"]) for group in state["param_groups"]))
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        named |= {
            number: names[param]
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


def name_misfits(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> list[str]:
    """Return as messages what makes the names of a state others than the optimizer's."""
    kind = type(optimizer).__name__
    if not is_named(state):
        return []
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
