"""A second optimizer of the same class, for trials that must not change the first."""

import copy
from collections import defaultdict
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

_ADDED = "differentiable"  # torch adds it to the defaults of each optimizer that loads a state


def trial_optimizer(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class on one group, with state of its own, that may step."""
    trial = _made(optimizer, group)
    begin: Any = getattr(trial, "train", None)  # a schedule-free one does not step before it
    if callable(begin):
        begin()
    return trial


def _made(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    own = {key: value for key, value in optimizer.defaults.items() if key != _ADDED}
    for options in (optimizer.defaults, own):
        with suppress(TypeError):  # its defaults are not its constructor's arguments
            return type(optimizer)([group], **options)  # some make their state in the constructor
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = []
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):  # a wrapper would step the one that trains
            setattr(trial, name, _made(value, group))
            trial.param_groups = vars(trial)[name].param_groups
        elif name not in vars(trial):  # torch copies none of a class's own
            setattr(trial, name, copy.copy(value))
    if not trial.param_groups:
        trial.add_param_group(group)
    return trial
