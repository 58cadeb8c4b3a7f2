"""Lays a table of rich out as plain text, in a terminal, a pipe and a notebook alike."""

from io import StringIO

from rich.console import Console, RenderableType


def plain_text(what: RenderableType, *, width: int) -> str:
    """Return what rich would print, without colours and without spaces at the ends of lines.

    A notebook shows nothing beside it: left to itself, rich would display each rank's in a cell.

    Args:
        what: A table, or a group of them.
        width: Most characters of a line.
    """
    console = Console(file=StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
