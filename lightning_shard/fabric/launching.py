"""Launchers of Fabric: ranks that are processes, or threads of this process.

fabric.launch()           processes: the script is run again for each, and goes on on all ranks
fabric.launch(train, x)   processes as well; threads: rank 0 runs on x, the others on copies
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_shard.backends.in_process import World, current_world
from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.errors import ConfigError
from lightning_shard.fabric._lightning import Launcher, fabric_of, has_no_function
from lightning_shard.fabric.replicas import copies_for_ranks
from lightning_shard.launchers.loggers import told_once
from lightning_shard.launchers.processes import ProcessLauncher


class FabricProcessLauncher(Launcher):
    """Starts the other ranks as processes that run the same script.

    Args:
        launcher: The launcher of processes.
    """

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
    """Runs a function on every rank of an in-process world.

    Args:
        num_ranks: Number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank and return rank 0's result.

        Rank 0 runs on this thread and on the originals, which are full afterwards.

        Raises:
            ConfigError: There is no function, or an object cannot be copied.
            BaseException: The error of the first rank to fail, with a note that names the rank.
        """
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
        others = copies_for_ranks(function, args, kwargs, num_copies=self._num_ranks - 1)
        calls = [partial(_run, function, args, kwargs), *(partial(_run, *one) for one in others)]
        faults, struck = faults_to_inject()
        world = World(self._num_ranks, faults, struck=struck)
        with told_once(fabric_of(function)):
            return world.run(lambda thread: calls[thread]())[0]


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
