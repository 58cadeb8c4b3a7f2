"""Later steps of an optimizer are tried before it takes them, for as long as it trains.

The trial before a fit (`elementwise`) takes a few steps. An optimizer may do something else later:
after a warm-up it divides by norms, say, and each rank would divide by its shard's. No number of
steps tells that there is no such step after them. So for optimizers that are not torch's own, the
trial goes on beside the run: one step on a small matrix and on the same matrix in parts, with the
options and counters that the optimizer has by now, before each step of its own. It is taken at a
fixed rate, since a rate of zero would hide everything, and at the optimizer's own.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_entries import of_parameters
from lightning_shard.errors import ConfigError
from lightning_shard.optim.course import Parts, PartsError, Runs, are_steps_alike, same_loss
from lightning_shard.optim.elementwise import DIFFERENCE, in_shards, is_of_torch, one_by_one
from lightning_shard.optim.owned_parameters import has_elements_only

_SHAPE = (4, 6)
_SCALES = (1.0, 1e-3, 1e3)  # what depends on the size of a gradient shows at some
_RATE = 1e-2


class LaterSteps:
    """Tries the steps of one optimizer ahead of it.

    Args:
        optimizer: The user's optimizer, which has passed the trial before the fit.
        engine: The engine that holds its parameters, in shards, in parts or by stages.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._rank = optimizer, engine.collectives.rank
        is_cut = engine.options.stage > 0 or bool(engine.split.groups)
        self._trials = [] if is_of_torch(optimizer) or not is_cut else _trials(optimizer, engine)

    def try_next(self, *, with_closure: bool) -> None:
        """Take one step of each trial.

        Args:
            with_closure: Whether the optimizer's own step is given a closure.

        Raises:
            ConfigError: The step does not update each element, or each parameter, by itself.
        """
        if not self._trials:
            return
        with torch.random.fork_rng(devices=[]):
            try:
                are_equal = all([trial.take_step(with_closure) for trial in self._trials])  # noqa: C419
            except Exception as error:  # what the optimizer raises of itself, where it is no trial
                self._end(error.args[0] if isinstance(error, PartsError) else error)
                return
        if not are_equal:
            raise ConfigError(
                f"Rank {self._rank}: from its step {self._trials[0].num_steps} on, "
                f"{type(self._optimizer).__name__} does not update each element or parameter by "
                f"itself ({DIFFERENCE}), but this strategy gives it shards, parts or some of the "
                f"parameters, which would make its updates wrong from now on; the steps before "
                f"came out alike. Use strategy='shard_ddp'."
            )

    def _end(self, error: Exception) -> None:
        self._trials = []
        rank_zero_warn(
            f"Later steps of {type(self._optimizer).__name__} cannot be tried on a small matrix "
            f"beside the run ({type(error).__name__}: {error}). If they use norms of a parameter, "
            f"or of several, they are wrong on shards: compare with strategy='shard_ddp'."
        )


def _trials(optimizer: Optimizer, engine: DataParallelEngine) -> list["_Trial"]:
    found: dict[str, _Trial] = {}
    for group in optimizer.param_groups:
        parts = in_shards if has_elements_only(group, engine) else one_by_one
        options = {key: value for key, value in group.items() if key != "params"}
        for rate in (_RATE, None) if "lr" in group else (None,):
            others = options if rate is None else {**options, "lr": rate}
            key = f"{parts.__name__} {rate} {sorted(others.items(), key=str)}"
            if key not in found:
                found[key] = _Trial(optimizer, group, parts, rate)
    return [*found.values()]


class _Trial:
    """An optimizer's steps on a small matrix, and on the same matrix in parts.

    Args:
        optimizer: The user's optimizer; it is not changed.
        group: The param group whose options it takes.
        parts: Takes the matrix apart; the first of its runs has all.
        rate: The learning rate of its steps; None takes the group's, whatever it is by then.

    Attributes:
        num_steps: Steps that it has taken.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], parts: Parts, rate: float | None
    ) -> None:
        self._optimizer, self._group, self._parts = optimizer, group, parts
        self._own = {"params"} if rate is None else {"params", "lr"}
        self._rate = rate
        self._generator = torch.Generator().manual_seed(1)
        self._runs: Runs | None = None
        self.num_steps = 0

    def take_step(self, with_closure: bool) -> bool:
        """Take the next step; return whether the parts came out as the whole."""
        device = next((p.device for p in self._group["params"] if not p.is_meta), None)
        values = torch.randn(2, *_SHAPE, generator=self._generator, dtype=torch.float64)
        weight, grad = values.to("cpu" if device is None else device)
        is_new = self._runs is None
        self._runs = runs = self._runs or Runs(
            self._optimizer, self._options(), self._parts, weight
        )
        self._follow_options(runs.optimizers)
        grad = grad * _SCALES[self.num_steps % len(_SCALES)]
        whole, parts = runs.step(grad, same_loss if with_closure else None)
        self.num_steps += 1
        if is_new:  # its state is there now
            self._follow_counters(runs.optimizers)
        if not whole.is_finite:
            self._runs = None  # thousands of steps at this rate lead away: begin again
        return are_steps_alike(whole, parts)

    def _options(self) -> dict[str, Any]:
        options = {key: copy.deepcopy(v) for key, v in self._group.items() if key not in self._own}
        return options if self._rate is None else options | {"lr": self._rate}

    def _follow_options(self, runs: Sequence[Optimizer]) -> None:
        """Take over numbers that schedulers, or steps themselves, have changed."""
        for key, value in self._group.items():
            if key not in self._own and isinstance(value, (int, float, tuple)):
                self._set([run.param_groups[0] for run in runs], key, value)

    def _follow_counters(self, runs: Sequence[Optimizer]) -> None:
        """Count on from where a fit has been resumed."""
        state = self._optimizer.state
        known: dict[str, Any] = next(
            (state[param] for param in self._group["params"] if param in state), {}
        )
        for key, value in known.items():
            states = [entries for run in runs for _, entries in of_parameters(run)]
            if _is_count(value):
                self._set(states, key, value)

    def _set(self, places: Sequence[dict[str, Any]], key: str, value: Any) -> None:
        """Set a value in each run, unless the runs have different ones: those are results."""
        held = [place.get(key) for place in places]
        if all(one is not None and bool(one == held[0]) for one in held):
            for place in places:
                place[key] = copy.deepcopy(value)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    return is_number and float(value).is_integer()
