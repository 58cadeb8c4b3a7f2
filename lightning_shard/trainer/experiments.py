"""What user code gives a logger's experiment is brought together on all ranks, before the call.

    self.logger.experiment.add_histogram(name, weight)
        rank 0    `Sharing` ──> weight in full ──> the logger's own experiment
        others    `Sharing` ──> weight in full ──> Lightning's dummy, which does nothing

Lightning has an experiment on rank 0 alone. It would ask for the elements of a weight while the
other ranks, whose dummies are given the same arguments, had gone on.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor


class _OfThread(threading.local):
    """Whether this thread's rank runs under a strategy of this package."""

    runs = False


_OWN = "_lightning_shard_experiment"  # what a `Sharing` looks like
_of_thread = _OfThread()


@contextmanager
def shared_experiments(loggers: Iterable[object]) -> Iterator[None]:
    """Inside, let every rank take part in what loggers' experiments are given on this thread."""
    for logger in loggers:
        owner: Any
        for owner in type(logger).__mro__:
            own = vars(owner).get("experiment")
            if type(own) is property:
                owner.experiment = _Experiment(own.fget, doc=own.__doc__)
    before, _of_thread.runs = _of_thread.runs, True
    try:
        yield
    finally:
        _of_thread.runs = before


class _Experiment(property):
    """In the place of a logger's own property, for the runs of all threads."""

    @override
    def __get__(self, logger: Any, owner: type | None = None, /) -> Any:
        found = super().__get__(logger, owner)
        is_shared = _of_thread.runs and logger is not None and found is not None
        return Sharing(found) if is_shared else found


class Sharing:
    """Looks like an experiment, and gives its methods full tensors; each rank must call."""

    def __init__(self, experiment: Any) -> None:
        vars(self)[_OWN] = experiment

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self)[_OWN])

    def __getattr__(self, name: str) -> Any:
        found = getattr(vars(self)[_OWN], name)
        is_method = callable(found) and not isinstance(found, (type, nn.Module))
        return _given_full(found) if is_method else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_OWN], name, value)

    def __getitem__(self, key: Any) -> Any:
        return Sharing(vars(self)[_OWN][key])

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self)[_OWN][key] = _in_full(value)


def _given_full(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _in_full((args, kwargs))
        return method(*args, **kwargs)

    return called


@torch.no_grad()
def _in_full(given: Any) -> Any:
    return apply_to_collection(given, Tensor, _full)


def _full(tensor: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    if gather is not None:
        return gather()
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.clone()  # which split layers show in full
    return full_tensor(tensor)  # type: ignore[no-any-return]
