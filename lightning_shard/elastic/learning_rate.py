"""Learning rates for another number of ranks, where each rank's batch stays as it is.

The step then has more or fewer samples. Everything that is a learning rate is multiplied by the
same factor, so that a schedule goes on as that factor times what it would have been:

    rule      factor               source
    linear    new / old            Goyal et al., arXiv:1706.02677
    sqrt      sqrt(new / old)      Krizhevsky, arXiv:1404.5997; Hoffer et al., arXiv:1705.08741

Momentum needs no correction: torch's SGD multiplies by the learning rate outside its momentum
buffer (the remark in section 3 of arXiv:1706.02677 is about the other form).

Private names of torch's schedulers, checked with torch 2.13: `_last_lr`, and the `_schedulers` that
one is made of; `tests/elastic/test_learning_rate.py` fails when one changes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.errors import ConfigError

Rule = Literal["linear", "sqrt"]

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # the last ones: OneCycleLR, SWALR
SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")


def rescale(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    old_ranks: int,
    new_ranks: int,
    rule: Rule = "linear",
) -> None:
    """Multiply learning rates as the rule says.

    Each rank must call, newcomers after they have got the others' state. Lower bounds of a schedule
    are learning rates, too. `Optimizer.defaults` stay: newcomers have those of the user's code.

    Args:
        optimizers: The optimizers; a rate of a group that is a tensor is changed in place.
        schedulers: The schedulers of torch, those within SequentialLR and ChainedScheduler
            included. Of others the rates change that have names as torch's; one without any warns.
        old_ranks: The number of ranks that the rates are for.
        new_ranks: The number of ranks that they shall be for.
        rule: "linear" or "sqrt".

    Raises:
        ConfigError: Another rule, or no ranks.
    """
    scale = _scaling(old_ranks, new_ranks, rule)
    done: set[int] = set()  # a tensor may be the rate of several groups
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in GROUP_RATES:
                if name in group:
                    group[name] = _scaled(group[name], scale, done)
    for scheduler in _with_nested(schedulers):
        _rescale_scheduler(scheduler, scale, done)


def _rescale_scheduler(scheduler: Any, scale: Callable[[Any], Any], done: set[int]) -> None:
    rates = {name: vars(scheduler)[name] for name in SCHEDULER_RATES if name in vars(scheduler)}
    if not rates:
        rank_zero_warn(
            f"The number of ranks has changed, and with it the learning rates, but the scheduler "
            f"of type {type(scheduler).__name__} keeps none under the names of torch's schedulers, "
            f"{', '.join(SCHEDULER_RATES)}. If it computes rates from numbers of its own, these "
            f"are still for the old number of ranks: derive it from torch's LRScheduler."
        )
    for name, value in rates.items():
        if isinstance(value, (list, tuple)):
            value = type(value)(_scaled(one, scale, done) for one in value)
        elif value is not None:
            value = _scaled(value, scale, done)
        setattr(scheduler, name, value)


def _scaling(old_ranks: int, new_ranks: int, rule: str) -> Callable[[Any], Any]:
    if min(old_ranks, new_ranks) < 1:
        raise ConfigError(
            f"A learning rate is for at least 1 rank, got {old_ranks} before and {new_ranks} now."
        )
    if rule == "linear":
        return lambda rate: rate * new_ranks / old_ranks
    if rule == "sqrt":
        factor = math.sqrt(new_ranks / old_ranks)
        return lambda rate: rate * factor
    raise ConfigError(f"The learning rate's rule must be 'linear' or 'sqrt', got {rule!r}.")


@torch.no_grad()
def _scaled(rate: Any, scale: Callable[[Any], Any], done: set[int]) -> Any:
    if not isinstance(rate, Tensor):
        return scale(rate)
    if id(rate) not in done:
        done.add(id(rate))
        rate.copy_(scale(rate))
    return rate


def _with_nested(schedulers: Iterable[Any]) -> list[Any]:
    """Each scheduler once, those inside others included."""
    found: dict[int, Any] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in found:
            found[id(scheduler)] = scheduler
            waiting.extend(vars(scheduler).get("_schedulers", ()))
    return list(found.values())
