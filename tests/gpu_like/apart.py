"""Fits in forks of this process, so that one that aborts is a result like another.

An error inside a backward on a device whose guard is written in Python ends the process: torch's
guard cannot call Python while an error is on its way. Such a fit is run again on one thread, and
the errors that Python has raised last are its result.
"""

import json
import os
import sys
import traceback
from typing import Any

import torch

from tests.gpu_like.fits import Seen, fit


def fit_apart(name: str, precision: str, rank: int = 0) -> Seen:
    """Fit as `fits.fit` does, in a fork; an abort is an error of the fit."""
    seen = _forked(name, precision, rank, False)
    if seen is None:
        seen = _forked(name, precision, rank, True) or Seen(error="aborted")
    return seen


def _forked(name: str, precision: str, rank: int, traces: bool) -> Seen | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(writing, name, precision, rank, traces)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    found = [json.loads(line) for line in lines]
    results = [one for one in found if isinstance(one, dict)]
    if results:
        return Seen(**results[-1])
    return Seen(error="; ".join(found[-3:])) if found else None


def _run(writing: int, name: str, precision: str, rank: int, traces: bool) -> None:
    """Write a fit's result into a pipe and end this process, a fork."""
    _silence()

    def tell(what: Any) -> None:
        os.write(writing, (json.dumps(what) + "\n").encode())

    try:
        if traces:
            torch.autograd.set_multithreading_enabled(False)
            told: set[str] = set()

            def trace(frame: Any, event: str, arg: Any) -> Any:
                if event == "exception" and frame.f_code.co_filename.startswith(os.getcwd()):
                    error = f"{arg[0].__name__}: {str(arg[1])[:300]}"
                    if error not in told:  # else it is on its way from the innermost function
                        told.add(error)
                        place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
                        tell(f"{error} ({place})")
                return trace

            sys.settrace(trace)
        tell(fit(name, precision, rank).as_dict())
    except BaseException:
        tell({"error": traceback.format_exc()})
    finally:
        os._exit(0)


def _silence() -> None:
    """Send what a fit prints, and what an abort does, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
