"""A second optimizer of the same class, for trials that must not change the first."""

import copy
from collections import defaultdict
from typing import Any

from torch.optim import Optimizer


def trial_optimizer(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class on one group, with state of its own."""
    try:  # some make their state in the constructor
        return type(optimizer)([group], **optimizer.defaults)
    except TypeError:  # its defaults are not its constructor's arguments
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = []
        trial.add_param_group(group)
        return trial
