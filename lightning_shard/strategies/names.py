"""The names of strategies, and the advice for them where ranks cannot be started."""

from typing import Any

from lightning_shard.core.schemes import OFFLOADED, SCHEMES
from lightning_shard.data_parallel.compression import COMPRESSORS
from lightning_shard.environments.launchers._lightning import Launcher, is_interactive
from lightning_shard.errors import ConfigError


def strategy_name(strategy: Any) -> str:
    """Return a Trainer's name of a strategy, without a backend; a subclass has that of its base."""
    names = {one.class_name: name for name, one in reversed(SCHEMES.items())}
    scheme = next(
        (names[one.__name__] for one in type(strategy).__mro__ if one.__name__ in names), ""
    )
    compressor = getattr(strategy, "compression", None)
    if scheme == "shard_ddp" and compressor is not None:
        kinds = {kind: name for name, kind in COMPRESSORS.items()}
        return f"{scheme}_{kinds[type(compressor)]}" if type(compressor) in kinds else scheme
    place = scheme, getattr(strategy, "offload", None)
    offloaded = next((name for name, one in OFFLOADED.items() if one == place), scheme)
    return offloaded or type(strategy).__name__


def check_interactive(strategy: Any, launcher: Launcher, num_ranks: int) -> None:
    """Refuse to start processes from a notebook, where there is no script to run again."""
    if not is_interactive() or launcher.is_interactive_compatible:
        return
    name = strategy_name(strategy)
    raise ConfigError(
        f"The strategy {name!r} starts its ranks by running the script again, which cannot be done "
        f"from a notebook or an interactive session (python -i). What works here is "
        f"Trainer(strategy='{name}_in_process', devices={num_ranks}), or "
        f"{type(strategy).__name__}(backend='in_process'): every rank is a thread of this process. "
        f"To train on processes, run the code as a script."
    )
