"""After a change of size a schedule goes on as one that was made for the new size."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from lightning_shard.elastic.data_assignment import GROUP_RATES, SCHEDULER_RATES, rescale
from lightning_shard.errors import ConfigError

NUM_STEPS = 24
Schedule = Callable[[Optimizer, float], LRScheduler]


def sequential(optimizer: Optimizer, factor: float) -> LRScheduler:
    stages: list[LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=0.01 * factor),
        lr_scheduler.ConstantLR(optimizer, 0.5, 3),
    ]
    return lr_scheduler.SequentialLR(optimizer, stages, [5, 14])


def chained(optimizer: Optimizer, factor: float) -> LRScheduler:
    stages: list[LRScheduler] = [
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        lr_scheduler.StepLR(optimizer, 3, 0.7),
    ]
    return lr_scheduler.ChainedScheduler(stages, optimizer)


# `factor`: by how much whoever writes a schedule for another size would multiply absolute rates
SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda opt, _: lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "multiplicative": lambda opt, _: lr_scheduler.MultiplicativeLR(opt, lambda _: 0.9),
    "step": lambda opt, _: lr_scheduler.StepLR(opt, 5),
    "multi step": lambda opt, _: lr_scheduler.MultiStepLR(opt, [4, 13, 15]),
    "constant": lambda opt, _: lr_scheduler.ConstantLR(opt, 0.3, 15),
    "linear": lambda opt, _: lr_scheduler.LinearLR(opt, 0.3, 0.9, 15),
    "exponential": lambda opt, _: lr_scheduler.ExponentialLR(opt, 0.9),
    "polynomial": lambda opt, _: lr_scheduler.PolynomialLR(opt, 20, 2.0),
    "cosine": lambda opt, f: lr_scheduler.CosineAnnealingLR(opt, 17, eta_min=0.02 * f),
    "warm restarts": lambda opt, f: lr_scheduler.CosineAnnealingWarmRestarts(
        opt, 5, 2, eta_min=0.02 * f
    ),
    "one cycle": lambda opt, f: lr_scheduler.OneCycleLR(opt, [0.3 * f, 0.6 * f], NUM_STEPS + 4),
    "cyclic": lambda opt, f: lr_scheduler.CyclicLR(opt, [0.01 * f, 0.02 * f], 0.2 * f, 4),
    "stochastic weight averaging": lambda opt, f: SWALR(opt, 0.05 * f, 6),
    "sequential": sequential,
    "chained": chained,
}


def make(rate: float, factor: float, *, tensor: bool = False) -> Optimizer:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "lr": 0.5 * rate * factor},
    ]
    lr: Any = torch.tensor(rate * factor, dtype=torch.float64) if tensor else rate * factor
    if tensor:
        return AdamW([{"params": [first]}, {"params": [second]}], lr=lr)
    return SGD(groups, lr=lr, momentum=0.9)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(kind: str, num_ranks: int, changes: dict[int, int], rule: Any = "linear") -> list[float]:
    """Every group's rate in every step; made for `num_ranks`, changed at the steps given."""
    factor = num_ranks / 4 if rule == "linear" else (num_ranks / 4) ** 0.5
    optimizer = make(0.1, factor)
    scheduler = SCHEDULES[kind](optimizer, factor)
    seen: list[float] = []
    for step in range(NUM_STEPS):
        if step in changes:
            rescale([optimizer], [scheduler], num_ranks, changes[step], rule)
            num_ranks = changes[step]
            assert scheduler.get_last_lr() == pytest.approx(rates(optimizer), rel=1e-12)
        seen += rates(optimizer)
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.few_cases(6)
@pytest.mark.filterwarnings("ignore:To get the last learning rate computed:UserWarning")
@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_as_if_made_for_the_new_size(kind: str, rule: str) -> None:
    for step, (old, new) in itertools.product((0, 3, 5, 11, 14, 20), [(4, 3), (2, 5)]):
        changed = run(kind, old, {step: new}, rule)
        at = 2 * step  # two groups
        assert changed[:at] == run(kind, old, {}, rule)[:at]
        assert changed[at:] == pytest.approx(run(kind, new, {}, rule)[at:], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_there_and_back(kind: str, rule: str) -> None:
    changed = run(kind, 4, {3: 3, 7: 1, 8: 5, 12: 4}, rule)
    assert changed[24:] == pytest.approx(run(kind, 4, {}, rule)[24:], rel=1e-9, abs=1e-15)


def test_rules() -> None:
    for rule, factor in (("linear", 0.25), ("sqrt", 0.5)):
        optimizer = make(0.8, 1.0)
        rescale([optimizer], [], 8, 2, rule)  # type: ignore[arg-type]
        assert rates(optimizer) == pytest.approx([0.8 * factor, 0.4 * factor], rel=1e-12)


def test_plateaus_keep_their_lower_bound_in_proportion() -> None:
    optimizer = make(0.4, 1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=[0.1, 0.02])
    rescale([optimizer], [scheduler], 4, 2)
    assert scheduler.min_lrs == [0.05, 0.01]
    for _ in range(4):
        scheduler.step(1.0)
    assert rates(optimizer) == pytest.approx([0.05, 0.01])


def test_a_plateaus_bound_of_groups_that_come_later() -> None:
    optimizer = make(0.4, 1.0)
    scheduler = ReduceLROnPlateau(optimizer, min_lr=0.1)
    rescale([optimizer], [scheduler], 4, 2)
    assert scheduler.default_min_lr == 0.05


def test_a_rate_that_is_a_tensor_of_several_groups_changes_in_place_and_once() -> None:
    optimizer = make(0.4, 1.0, tensor=True)
    shared = optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[1]["lr"] is shared
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    rescale([optimizer], [scheduler], 4, 2)
    assert optimizer.param_groups[0]["lr"] is shared
    assert shared.item() == pytest.approx(0.2)
    assert [float(rate) for rate in scheduler.base_lrs] == pytest.approx([0.2, 0.2])
    assert [float(group["initial_lr"]) for group in optimizer.param_groups] == [0.2, 0.2]


def test_a_scheduler_given_twice_changes_once() -> None:
    optimizer = make(0.4, 1.0)
    inner = lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=0.1)
    outer = lr_scheduler.ChainedScheduler([inner], optimizer)
    rescale([optimizer], [outer, inner, outer], 4, 2)
    assert inner.eta_min == 0.05


def test_several_optimizers() -> None:
    optimizers = [make(0.4, 1.0), make(0.2, 1.0)]
    rescale(optimizers, [], 2, 3)
    assert rates(optimizers[0]) == pytest.approx([0.6, 0.3])
    assert rates(optimizers[1]) == pytest.approx([0.3, 0.15])


def test_a_scheduler_that_hides_its_rates_warns() -> None:
    class Own:
        def __init__(self) -> None:
            self.peak = 0.3

    with pytest.warns(UserWarning, match="type Own keeps none under the names of torch's sched"):
        rescale([], [Own()], 2, 3)


def test_options_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="must be 'linear' or 'sqrt', got 'cubic'"):
        rescale([], [], 1, 2, "cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1 rank, got 0 before and 2 now"):
        rescale([], [], 0, 2)


def test_no_scheduler_of_torchs_is_left_out() -> None:
    theirs = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type)}
    theirs = {name for name in theirs if name.endswith(("LR", "Scheduler", "Restarts", "Plateau"))}
    tested = {type(make_one(make(0.1, 1.0), 1.0)).__name__ for make_one in SCHEDULES.values()}
    assert theirs - tested == {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}


def test_no_rate_of_torchs_schedulers_is_left_out() -> None:
    """A name with 'lr' or 'eta' in it that torch adds, and that is not known here, fails."""
    others = {"lr_lambdas", "_get_lr_called_within_step", "use_beta1"}
    found: set[str] = set()
    for make_schedule in SCHEDULES.values():
        optimizer = make(0.1, 1.0)
        before = set(optimizer.param_groups[0])
        scheduler = make_schedule(optimizer, 1.0)
        new = set(optimizer.param_groups[0]) - before
        found |= {name for name in new if "lr" in name} - set(GROUP_RATES)
        found |= {n for n in vars(scheduler) if "lr" in n or "eta" in n} - set(SCHEDULER_RATES)
    found |= {n for n in vars(ReduceLROnPlateau(make(0.1, 1.0))) if "lr" in n or "eta" in n}
    assert found - set(SCHEDULER_RATES) - others == set()
