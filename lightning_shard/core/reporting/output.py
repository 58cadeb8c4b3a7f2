"""What people are shown: sizes in words, tables as plain text, and empty pictures.

Tables are rich's; as plain text they look alike in a terminal, a pipe and a notebook.
"""

from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from lightning_shard.core.extras import missing
from lightning_shard.errors import ConfigError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float, digits: str = ".2f") -> str:
    """Write a size in the largest binary unit of which it has one; `digits` above a byte."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:{digits if unit else '.4g'}} {UNITS[unit]}"


def new_figure(path: str | Path, *, size: tuple[float, float], otherwise: str) -> Any:
    """Return an empty matplotlib figure, of a size in inches, without pyplot and its global state.

    Without matplotlib the error names the path, and what gives the same `otherwise`.
    """
    if lack := missing("matplotlib"):
        raise ConfigError(f"The picture {path} cannot be drawn: {lack}. {otherwise}")
    return import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")


def plain_text(what: RenderableType, *, width: int) -> str:
    """Return what rich would print, without colours and without spaces at the ends of lines.

    A notebook shows nothing beside it: left to itself, rich would display each rank's in a cell.
    """
    console = Console(file=StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
