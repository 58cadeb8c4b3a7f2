"""Where in the user's code an operation was called."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType

_INNER_PACKAGES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    __name__.partition(".")[0],
)


def _inner_folders() -> Iterator[str]:
    for package in _INNER_PACKAGES:
        spec = find_spec(package)  # which imports nothing
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            yield os.path.abspath(folder) + os.sep


_INNER_FOLDERS = tuple(_inner_folders())
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
