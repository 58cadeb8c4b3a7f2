"""Empty matplotlib figures: matplotlib is imported on first use, and its absence explained."""

from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigError


def new_figure(path: str | Path, *, size: tuple[float, float], otherwise: str) -> Any:
    """Return an empty matplotlib figure, without pyplot and its global state.

    Args:
        path: File that the picture is for, for the error.
        size: Width and height in inches.
        otherwise: Advice for the error: what gives the same without matplotlib.

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
