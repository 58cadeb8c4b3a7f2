"""Where in the user's code an operation was called."""

import os
import sys
from dataclasses import dataclass
from types import FrameType

import lightning
import torch

_INNER_FOLDERS = tuple(
    os.path.abspath(folder) + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(lightning.__file__),
        os.path.dirname(os.path.dirname(__file__)),  # this package
    )
)
_is_inner: dict[str, bool] = {}  # by file name; only ever a cache


@dataclass(frozen=True, slots=True)
class CallSite:
    """A file and a line."""

    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


def find_call_site() -> CallSite:
    """Return the innermost frame that is neither torch's nor Lightning's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        inner = _is_inner.get(filename)
        if inner is None:
            inner = _is_inner[filename] = filename.startswith(_INNER_FOLDERS)
        if not inner:
            return CallSite(filename, frame.f_lineno)
        frame = frame.f_back
    return CallSite("<no Python caller>", 0)
