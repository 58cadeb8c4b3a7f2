"""Finds the line of the user's code that called an operation, and what an error went through.

Between that line and the process group lie frames of torch, Lightning and this package, of the
standard library that wraps their functions (`functools`, `contextlib`), and code that a compiler
has made. This is the one file that looks at frames, for what people are told.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

from lightning_shard.core.states import having

_WRAPPING_PACKAGES = (
    "torch",
    "torchgen",
    "functorch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "lightning_utilities",
    "torchmetrics",
    "safetensors",
)
_WRAPPING_MODULES = ("typing_extensions", "decorator", "wrapt")
# Of the import system, and of graphs that torch has traced; "<stdin>" and the like are the user's.
_GENERATED = ("<frozen ", "<eval_with_key>", "<lambdifygenerated", "<torch_package")


def _folder(path: str) -> str:
    return os.path.abspath(path) + os.sep


def _find_inner() -> tuple[str, ...]:
    """Return the beginnings of the file names of frames that are not the user's."""
    found = [os.path.dirname(os.path.dirname(__file__)) + os.sep, *_GENERATED]
    for name in (*_WRAPPING_PACKAGES, *_WRAPPING_MODULES):
        spec = None
        with suppress(ValueError):  # what stands in for a module, without a spec
            spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found += [_folder(folder) for folder in spec.submodule_search_locations]
        elif spec is not None and spec.origin is not None:
            found.append(os.path.abspath(spec.origin))
    return tuple(found)


_INNER = _find_inner()
_STANDARD_LIBRARY = tuple(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
# Installed packages lie below the standard library.
_INSTALLED = (
    *(_folder(sysconfig.get_path(name)) for name in ("purelib", "platlib")),
    *(f"{folder}site-packages{os.sep}" for folder in _STANDARD_LIBRARY),
    *(f"{folder}dist-packages{os.sep}" for folder in _STANDARD_LIBRARY),
)
_launch: ContextVar[tuple[str, int]] = ContextVar("launch", default=("<no Python caller>", 0))
_read: ContextVar[str] = ContextVar("read", default="")  # by user code, in this thread


@dataclass(frozen=True, slots=True)
class CallSite:
    """The file and line of a call."""

    filename: str
    line: int
    purpose: str = ""

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}{self.purpose}"


def start_thread_at(site: CallSite) -> None:
    """Have this thread's calls name the line that has started it where they are not the user's."""
    _launch.set((site.filename, site.line))


def reading(name: str) -> AbstractContextManager[object]:
    """Let errors of collective calls inside say that they bring what user code reads of `name`."""
    return having(_read, name)


def purpose() -> str:
    """Return what collective calls are for now, to follow their names; "" for training itself."""
    name = _read.get()
    return name and (
        f" to read {name!r}, of which ranks have parts: every rank must read it, or none; read on "
        f"all, then write on one"
    )


def find_call_site(frame: FrameType | None = None) -> CallSite:
    """Return the innermost frame that is not of torch, Lightning, a wrapper or this package."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not _wraps(frame.f_code.co_filename):
            return CallSite(frame.f_code.co_filename, frame.f_lineno, purpose())
        frame = frame.f_back
    return CallSite(*_launch.get(), purpose())


def calls_through(error: BaseException) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield the code and the variables of each call that an error has ended, outermost first."""
    for frame, _ in walk_tb(error.__traceback__):
        yield frame.f_code, frame.f_locals


def went_through_user_code(error: BaseException) -> bool:
    """Whether an error has ended a call of code that is neither installed nor this package's."""
    names = (code.co_filename for code, _ in calls_through(error))
    return any(not _wraps(name) and not name.startswith(_INSTALLED) for name in names)


@cache
def _wraps(filename: str) -> bool:
    """Whether a file only wraps the calls of the user and of other libraries."""
    is_standard = filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_INSTALLED)
    return is_standard or filename.startswith(_INNER)
