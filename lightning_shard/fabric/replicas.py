"""Copies of a launched function and its arguments, for the ranks that are threads.

One deep copy for each rank, of everything at once, so that what was one object stays one: the
Fabric, its callbacks, modules, optimizers and what else is passed or in the function's closure. Not
copied are map-style datasets, loggers and the standard streams. A function's module has its globals
once: what is found there is every rank's, and set up by one only.
"""

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shard.errors import ConfigError
from lightning_shard.fabric._lightning import fabric_of
from lightning_shard.launchers._copy import copy_with_functions
from lightning_shard.launchers.replicas import memo_of

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def copies_for_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    num_copies: int,
) -> list[Call]:
    """Return as many copies of a call, each with objects of its own.

    Raises:
        ConfigError: An object cannot be copied.
    """
    return [_copy(function, args, kwargs) for _ in range(num_copies)]


def _copy(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    reached = list(_reached([function, args, kwargs], set()))
    modules = [one for one in reached if isinstance(one, nn.Module)]
    others = [one for one in reached if not isinstance(one, nn.Module)]
    owners = {f"{type(one).__name__} {number}": one for number, one in enumerate(modules)}
    fabric = fabric_of(function)
    memo = memo_of(fabric, owners, [args, kwargs, *_contents(function)])
    try:
        copied: Call = copy_with_functions((function, args, kwargs), memo, modules, others)
    except Exception as error:
        raise ConfigError(
            f"in_process: what fabric.launch was given cannot be copied for the ranks other than 0 "
            f"({type(error).__name__}: {error}). Make it inside the launched function, or give its "
            f"class a __deepcopy__."
        ) from error
    return copied


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield modules, optimizers and whatever has state of its own that a call reaches."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Optimizer)):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _reached(one, seen)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _reached(one, seen)
    elif isinstance(value, MethodType):
        yield value.__self__
        yield from _reached(value.__func__, seen)
    else:
        if hasattr(value, "__dict__") and not isinstance(value, (FunctionType, type)):
            yield value
        for one in _contents(value):
            yield from _reached(one, seen)


def _contents(value: Any) -> list[Any]:
    """Return what a function holds: of a partial call its arguments, of others their closure."""
    if hasattr(value, "func") and hasattr(value, "keywords"):
        inner = [value.func, *value.args, *value.keywords.values()]
        return [*inner, *(one for part in inner for one in _contents(part))]
    if isinstance(value, MethodType):
        return _contents(value.__func__)
    if not isinstance(value, FunctionType):
        return []
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    return [*cells, *(value.__defaults__ or ())]
