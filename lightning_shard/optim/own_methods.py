"""Methods of an optimizer that work with its state and its weights, called between two steps.

    optimizer.eval()     p.lerp_(state["z"], ...)     schedule-free ones show their averaged weights
    optimizer.backup_and_load_cache()                 lookahead shows its slow ones

Between steps weights look full and state is a rank's shards, so these would not fit each other. A
method that a trial finds to do the same to parts as to a whole runs as a step does, in the
optimizer's view: on shards. What a trial shows to need full tensors is left as it is.

The class gets the method that decides, since Lightning and Fabric wrap optimizers in classes that
derive from the optimizer's: these find a method there, and not on the optimizer itself.
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
from lightning_shard.optim.course import Parts, PartsError, Runs, are_steps_alike, same_loss
from lightning_shard.optim.elementwise import (
    in_shards,
    is_of_torch,
    one_by_one,
    takes_closure,
    why_not_elementwise,
)

_RUNNER = "_lightning_shard_own_method"  # on an optimizer
_SHAPE, _NUM_STEPS = (6, 4), 2


class OwnMethods:
    """Runs an optimizer's own methods in a context until `detach`.

    Args:
        optimizer: The user's optimizer.
        run: Calls what it is given where parameters show what the optimizer updates.

    Attributes:
        names: The methods that run there.
        begins_early: Whether a step uses state or weights before it calls its closure.
    """

    def __init__(self, optimizer: Optimizer, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.optimizer, self.run = optimizer, run
        self.names = frozenset[str]() if is_of_torch(optimizer) else _same_on_parts(optimizer)
        self.begins_early = not is_of_torch(optimizer) and _begins_early(optimizer)
        if self.names:
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
        if not is_its or name not in runner.names:  # a trial's copy, say
            return method(self, *args, **kwargs)
        return runner.run(lambda: method(self, *args, **kwargs))

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


def _same_on_parts(optimizer: Optimizer) -> frozenset[str]:
    """Return what does the same to parts as to a whole, also after others; classes learn it."""
    found = list(_candidates(optimizer))
    if not found or not optimizer.param_groups:
        return frozenset()
    parts = one_by_one if why_not_elementwise(optimizer) is not None else in_shards
    with torch.random.fork_rng(devices=[]):
        alone = {name: _tried(optimizer, parts, [name]) for _, name, _ in found}
        may = [name for name, is_same in alone.items() if is_same is not False]
        after = {
            name: [alone[name], *(_tried(optimizer, parts, [o, name]) for o in may)] for name in may
        }
    same = {name for name, results in after.items() if True in results and False not in results}
    for kind, name, method in found:
        if name in same and not hasattr(method, "decides"):
            decides = _deciding(name, method)
            decides.decides = True  # type: ignore[attr-defined]
            setattr(kind, name, decides)
    return frozenset(same)


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
    with suppress(Exception), torch.random.fork_rng(devices=[]):  # it is refused, or trains
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


def _tried(optimizer: Optimizer, parts: Parts, names: Sequence[str]) -> bool | None:
    """Whether methods do the same to parts as to a whole; None where the whole raises."""
    for loss in (None, same_loss):
        try:
            runs, values = _runs(optimizer, parts)
            for grad in values[1:]:
                runs.step(grad, loss)
            return all(are_steps_alike(*runs.call(name)) for name in names)
        except PartsError:
            return False
        except Exception:  # it needs a closure, or another method before
            continue
    return None
