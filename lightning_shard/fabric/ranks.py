"""How the ranks of a strategy of Fabric start, as processes or as threads of this process.

    fabric.launch()           processes: the script is run again for each, and goes on on all
    fabric.launch(train, x)   processes as well; threads: rank 0 runs on x, the others on copies

A thread's copy is one deep copy of the function and its arguments, so that what was one object
stays one. Map-style datasets, loggers and the standard streams are not copied. A function's module
has its globals once: what is found there is every rank's, and set up by one only.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.backends.in_process.world import World, current_world
from lightning_shard.environments.launchers._copy import held_by
from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.environments.launchers.replicas import copy_for_rank, memo_of, told_once
from lightning_shard.errors import ConfigError
from lightning_shard.fabric._lightning import Launcher, fabric_of, has_no_function

Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]


class FabricProcessLauncher(Launcher):
    """Starts the other ranks as processes that run the same script."""

    def __init__(self, launcher: ProcessLauncher) -> None:
        super().__init__()
        self._launcher = launcher

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._launcher.is_interactive_compatible

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks, unless a launcher outside has, and run `function` here."""
        return self._launcher.launch(partial(function, *args, **kwargs))


class FabricThreadLauncher(Launcher):
    """Runs a function on every rank of an in-process world."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on every rank, rank 0 here on the originals; return its result."""
        if has_no_function(function) and self._num_ranks > 1:
            raise ConfigError(
                f"fabric.launch() was called without a function, but the {self._num_ranks} ranks "
                f"of the backend 'in_process' are threads, expected the function that each runs. "
                f"Call fabric.launch(train), where train(fabric) sets up and trains."
            )
        if current_world() is not None:
            raise ConfigError(
                "fabric.launch was called inside an in-process world, whose ranks are threads "
                "already; expected a call outside of it. Launch once, around all that the ranks do."
            )
        call = (function, list(args), kwargs)
        others = [_copy(*call) for _ in range(self._num_ranks - 1)]
        calls = [partial(_run, *one) for one in (call, *others)]
        faults, struck = faults_to_inject()
        world = World(self._num_ranks, faults, struck=struck)
        with told_once(fabric_of(function)):
            return world.run(lambda thread: calls[thread]())[0]


def _run(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rank's function, and make full what it leaves in shards; each rank must call."""
    fabric = fabric_of(function)
    try:
        result = function(*args, **kwargs)
        if fabric is not None:
            fabric.strategy.end_launch(restore=True)
    except BaseException:
        if fabric is not None:
            fabric.strategy.end_launch(restore=False)
        raise
    return result


def _copy(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Return a copy of a call, with objects of its own; `args` may get other iterators."""
    reached = list(_reached([function, args, kwargs], set()))
    modules = [one for one in reached if isinstance(one, nn.Module)]
    others = [one for one in reached if not isinstance(one, nn.Module)]
    owners = {f"{type(one).__name__} {number}": one for number, one in enumerate(modules)}
    fabric = fabric_of(function)
    memo = memo_of(fabric, owners, reached)
    own = function.args[0] if isinstance(function, partial) else function
    outer = inspect.getclosurevars(own).nonlocals if isinstance(own, FunctionType) else {}
    named = {id(value): name for name, value in {**owners, **kwargs, **outer}.items()}
    call = (function, args, kwargs)
    copied: Call = copy_for_rank(call, memo, modules, others, named, "the launched function")
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
        for one in held_by(value):
            yield from _reached(one, seen)
