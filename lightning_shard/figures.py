"""Where pictures begin: matplotlib is imported when one is asked for, and its absence explained."""

from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigError


def new_figure(path: str | Path, *, size: tuple[float, float], otherwise: str) -> Any:
    """Return an empty matplotlib figure, without pyplot and its global state.

    Args:
        path: Where the picture shall be written; for the error.
        size: Width and height in inches.
        otherwise: What gives the same without matplotlib; for the error.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figure_of = import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A picture ({path}) needs {error.name}, which is not installed: "
            f"pip install matplotlib. {otherwise}"
        ) from error
    return figure_of(figsize=size, layout="constrained")
