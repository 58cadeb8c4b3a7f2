"""The private names of torch.compile that copies of compiled code need, and nothing else.

Checked with torch 2.11 and 2.13; `tests/launchers/test_torch.py` fails when one changes.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any


def uncompiled(function: FunctionType) -> Callable[..., Any] | None:
    """Return the function that `torch.compile` has compiled, or None for one it has not made."""
    if vars(function).get("_torchdynamo_wrapper_id") != id(function):
        return None
    written: Callable[..., Any] = vars(function)["_torchdynamo_orig_callable"]
    return written


def compile_again(compiled: FunctionType, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with the options with which another was compiled."""
    compiler = inspect.getclosurevars(compiled).nonlocals["self"]
    again: Callable[..., Any] = compiler(function)
    return again
