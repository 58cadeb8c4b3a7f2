"""Methods of an optimizer that work with its state and its weights, called between two steps.

    optimizer.eval()     p.lerp_(state["z"], ...)     schedule-free ones show their averaged weights
    optimizer.backup_and_load_cache()                 lookahead shows its slow ones

Between steps weights look full and state is a rank's shards. A method that a trial finds to do the
same to parts as to a whole runs on shards, in the optimizer's view, as a step does; others are
called as they are, with a warning. The class gets the method that decides, since Lightning and
Fabric wrap optimizers in classes that derive from it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.data_parallel.optimizer_entries import of_parameters
from lightning_shard.optim.elementwise import (
    DIFFERENCE,
    Parts,
    Runs,
    TrialError,
    are_steps_alike,
    in_shards,
    is_of_torch,
    one_by_one,
    same_loss,
    takes_closure,
    why_not_elementwise,
)

_RUNNER = "_lightning_shard_own_method"  # on an optimizer
_SHAPE, _NUM_STEPS = (6, 4), 2


class OwnMethods:
    """Runs an optimizer's own methods in a context until `detach`."""

    def __init__(self, optimizer: Optimizer, run: Callable[[Callable[[], Any], str], Any]) -> None:
        self.optimizer, self.run = optimizer, run
        self.obstacles = {} if is_of_torch(optimizer) else _tried_methods(optimizer)
        self.begins_early = not is_of_torch(optimizer) and _begins_early(optimizer)
        if self.obstacles:
            setattr(optimizer, _RUNNER, self)

    def detach(self) -> None:
        """Leave the methods to the class."""
        vars(self.optimizer).pop(_RUNNER, None)


def _deciding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs in the view of the optimizer that it is called of."""

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner: Any = getattr(self, _RUNNER, None)  # of a wrapper it is that of the optimizer
        is_its = runner is not None and runner.optimizer in (self, getattr(self, "optimizer", None))
        if not is_its or name not in runner.obstacles:  # a trial's copy, say
            return method(self, *args, **kwargs)
        return runner.run(lambda: method(self, *args, **kwargs), runner.obstacles[name])

    return called


def _candidates(optimizer: Optimizer) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield methods beside torch's own that read state and can be called without arguments."""
    for kind in type(optimizer).__mro__:
        if kind is Optimizer:
            return
        for name, found in list(vars(kind).items()):
            if not isinstance(found, FunctionType) or name[:1] == "_" or hasattr(Optimizer, name):
                continue
            written = inspect.unwrap(found)
            _, *others = inspect.signature(written).parameters.values()
            is_free = all(one.default is not one.empty or one.kind in _MORE for one in others)
            if "state" in written.__code__.co_names and is_free:
                yield kind, name, found


_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _tried_methods(optimizer: Optimizer) -> dict[str, str]:
    """Return what is against methods on parts, also after others; their classes learn to ask."""
    found = list(_candidates(optimizer))
    if not found or not optimizer.param_groups:
        return {}
    parts = one_by_one if why_not_elementwise(optimizer) is not None else in_shards
    with torch.random.fork_rng(devices=[]):
        alone = {name: _tried(optimizer, parts, [name]) for _, name, _ in found}
        may = [name for name, result in alone.items() if result != DIFFERENCE]
        after = {
            name: [alone[name], *(_tried(optimizer, parts, [o, name]) for o in may)] for name in may
        }
    for kind, name, method in found:
        if not hasattr(method, "decides"):
            decides = _deciding(name, method)
            decides.decides = True  # type: ignore[attr-defined]
            setattr(kind, name, decides)
    return {name: _verdict(name, after.get(name, [result])) for name, result in alone.items()}


def _verdict(name: str, results: Sequence[str]) -> str:
    """Return what is against a method: a difference, or what it raises whatever was before it."""
    found = DIFFERENCE if DIFFERENCE in results else min(results, key=bool)
    return found and f"{name}, {found}"


def _begins_early(optimizer: Optimizer) -> bool:
    """Whether the weights or the state that a trial's closure finds are others than before it."""
    found: list[tuple[int, Tensor]] = []

    def note(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        run = runs.optimizers[0]
        if params[0] is run.param_groups[0]["params"][0]:
            size = sum(len(entries) for _, entries in of_parameters(run))
            found.append((size, params[0].detach().clone()))
        return same_loss(params, grads)

    if not takes_closure(optimizer) or not optimizer.param_groups:
        return False
    with suppress(TrialError), torch.random.fork_rng(devices=[]):  # a trial of steps tells of it
        runs, values = _runs(optimizer, one_by_one)
        for grad in values[1:]:
            runs.step(grad, note)
    pairs = zip(found[::2], found[1::2], strict=False)  # by the trial, and by the step
    return any(one[0] != two[0] or not torch.equal(one[1], two[1]) for one, two in pairs)


def _runs(optimizer: Optimizer, parts: Parts) -> tuple[Runs, Tensor]:
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    values = torch.randn(1 + _NUM_STEPS, *_SHAPE, generator=torch.Generator().manual_seed(0))
    values = values.double()
    return Runs(optimizer, settings, parts, values[0]), values


def _tried(optimizer: Optimizer, parts: Parts, names: Sequence[str]) -> str:
    """Return how methods differ on parts, or what the whole raises; "" where they do the same."""
    raised = ""
    for loss in (None, same_loss):
        try:
            runs, values = _runs(optimizer, parts)
            for grad in values[1:]:
                runs.step(grad, loss)
            same = all(are_steps_alike(*runs.call(name)) for name in names)
            return "" if same else DIFFERENCE
        except TrialError as error:  # it needs a closure, or another method before
            if error.of_parts:
                return DIFFERENCE
            raised = f"in a trial on a small matrix, raised {error}"
    return raised
