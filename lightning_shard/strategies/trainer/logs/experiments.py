"""What user code gives loggers is brought together on all ranks, before the call.

Lightning logs on rank 0 alone. It would ask for the elements of a weight while the other ranks,
which are given the same arguments, had gone on. So the loggers' classes let every rank take part.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.core.states import setting
from lightning_shard.pipeline_parallel.containers import held_values, with_values
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor


class LoggerCall(NamedTuple):
    """What user code gives a logger."""

    logger: Any
    path: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> Any:
        """Make the call."""
        target = self.logger
        for one in self.path:
            target = target[one[0]] if isinstance(one, list) else getattr(target, one)
        return target(*self.args, **self.kwargs)


class _LoggingOfThread(threading.local):
    """What this thread's rank does with calls: whether it shares them, and who takes them."""

    runs = False
    takes: Callable[[LoggerCall], None] | None = None


_OWN = "_lightning_shard_experiment"  # what a `Sharing` looks like
_PLACE = "_lightning_shard_place"  # its logger, and what leads from there to it
_SHARES = "_lightning_shard_shares"  # marks methods that are wrapped already
_MODULES = ("lightning.fabric.loggers.logger", "lightning_fabric.loggers.logger")
_LIGHTNINGS = {"log_hyperparams", "log_graph", "after_save_checkpoint", "save", "finalize"}
_of_thread = _LoggingOfThread()


@contextmanager
def shared_loggers() -> Iterator[None]:
    """Inside, let every rank take part in what loggers are given on this thread."""
    bases: list[type] = [sys.modules[name].Logger for name in _MODULES if name in sys.modules]
    for kind in itertools.chain.from_iterable(map(_subclasses, bases)):
        for name, own in list(vars(kind).items()):
            if name == "experiment" and type(own) is property:
                setattr(kind, name, _Experiment(own.fget, doc=own.__doc__))
            elif _is_for_values(name, own):
                setattr(kind, name, _shared(name, own))
    with setting(_of_thread, runs=True):
        yield


def taking(takes: Callable[[LoggerCall], None]) -> AbstractContextManager[None]:
    """Inside, let calls on this thread be taken, not made."""
    return setting(_of_thread, takes=takes)


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _is_for_values(name: str, own: object) -> bool:
    """Whether a member of a logger's class is a method that is given values, and not wrapped."""
    is_own = type(own) is FunctionType and not name.startswith("_") and name not in _LIGHTNINGS
    return is_own and _SHARES not in vars(own)


class _Experiment(property):
    """In the place of a logger's own property, for the runs of all threads."""

    @override
    def __get__(self, logger: Any, owner: type | None = None, /) -> Any:
        found = super().__get__(logger, owner)
        is_shared = _of_thread.runs and logger is not None and found is not None
        return Sharing(found, logger, ("experiment",)) if is_shared else found


class Sharing:
    """Looks like an experiment, and gives its methods full tensors; each rank must call."""

    def __init__(self, experiment: Any, logger: Any, path: tuple[Any, ...]) -> None:
        vars(self).update({_OWN: experiment, _PLACE: (logger, path)})

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self)[_OWN])

    def __getattr__(self, name: str) -> Any:
        found = getattr(vars(self)[_OWN], name)
        is_method = callable(found) and not isinstance(found, (type, nn.Module))
        return self._called(found, name) if is_method else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_OWN], name, value)

    def __getitem__(self, key: Any) -> Any:
        logger, path = vars(self)[_PLACE]
        return Sharing(vars(self)[_OWN][key], logger, (*path, [key]))

    def __setitem__(self, key: Any, value: Any) -> None:
        own = vars(self)[_OWN]
        self._called(partial(type(own).__setitem__, own), "__setitem__")(key, value)

    def _called(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        logger, path = vars(self)[_PLACE]

        @wraps(method, assigned=("__doc__", "__name__"), updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            return _give(method, LoggerCall(logger, (*path, name), args, kwargs))

        return called


def _shared(name: str, method: FunctionType) -> Callable[..., Any]:
    """Return what stands for a method in the class of a logger."""

    @wraps(method)
    def called(logger: Any, *args: Any, **kwargs: Any) -> Any:
        return _give(partial(method, logger), LoggerCall(logger, (name,), args, kwargs))

    vars(called)[_SHARES] = True
    return called


def _give(method: Callable[..., Any], call: LoggerCall) -> Any:
    if not _of_thread.runs:
        return method(*call.args, **call.kwargs)
    if _of_thread.takes is not None:
        return _of_thread.takes(call)
    with torch.no_grad():
        args, kwargs = _all_in_full((call.args, call.kwargs))
    return method(*args, **kwargs)


def _all_in_full(value: Any) -> Any:
    if _is_plain(value):
        return value
    if isinstance(value, Tensor):
        return in_full(value)
    return with_values(value, {key: _all_in_full(one) for key, one in _held(value).items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor
    return all(map(_is_plain, _held(value).values()))


def _held(value: Any) -> dict[Any, Any]:
    return held_values(value) or {}


def in_full(tensor: Tensor) -> Tensor:
    """Return a tensor's elements of all ranks that have parts of it; each must call."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    if gather is not None:
        return gather()
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.clone()  # which split layers show in full
    return full_tensor(tensor)  # type: ignore[no-any-return]
