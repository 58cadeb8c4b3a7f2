"""One program under one scheme, and the verdict: equal, refused by name, or a defect."""

import linecache
import logging
import os
import pickle
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    LayoutError,
)
from lightning_shard.testing import Fault, injected_faults  # noqa: F401 - of the schemes
from tests.fuzz import batches, exact, hooks, models, optimizing, steps, trainers  # noqa: F401
from tests.fuzz.compare import first_difference, kind_of, says_something, tolerance_of
from tests.fuzz.features import tags_of
from tests.fuzz.program import program
from tests.fuzz.schemes import SCHEMES, Scheme
from tests.processes import ProcessesFailedError, run_processes

REFUSALS = (
    ConfigError,
    LayoutError,
    BackendUnavailableError,
    CheckpointError,
    MisconfigurationException,
)
# What Lightning itself refuses under any strategy of several ranks.
BY_LIGHTNING = ("Skipping the `training_step` by returning None",)

_TALKATIVE = ("lightning.pytorch", "lightning.fabric", "lightning_shard")

EQUAL, REFUSED, DEFECT = "equal", "refused", "defect"
UNFIT = "unfit"  # the program does not run on one device, or its values say nothing
LEFT_OUT = "left out"  # the scheme's page does not promise it


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        kind: Of a defect, what its verdict is grouped by.
    """

    verdict: str
    kind: str = ""
    text: str = ""


def judged(features: Sequence[str], seed: int, scheme_name: str) -> Outcome:
    """Train a program under a scheme, and compare it with one device."""
    scheme = SCHEMES[scheme_name]
    # Fewer ranks make more batches of a step, whose numbers are others then.
    by_number = scheme.faults and re.search("batch_idx (%|==)", program(features, seed))
    if by_number or not scheme.promises(features):
        return Outcome(LEFT_OUT)
    with _quiet():
        return _judged(features, seed, scheme)


def _judged(features: Sequence[str], seed: int, scheme: Scheme) -> Outcome:
    one = on_one_device(tuple(features), seed)
    if isinstance(one, str):
        return Outcome(UNFIT, one.rsplit("\n", 1)[-1][:200], one)
    try:
        with loaded(program(features, seed)) as module:
            other = _on_ranks(module, features, seed, scheme)
    except BaseException as error:
        return _of_error(error, module.PROGRESS["steps"])
    if scheme.faults:
        one = {name: value for name, value in one.items() if not name.startswith("note ")}
    tolerance = scheme.tolerance or tolerance_of(tags_of(features))
    difference = first_difference(one, other, tolerance)
    if difference is None:
        return Outcome(EQUAL)
    return Outcome(DEFECT, kind_of(difference), difference)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Lightning and torch say of the runs inside, which compute on one thread."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels, threads = [one.level for one in loggers], torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)


@lru_cache(maxsize=4)
def on_one_device(features: tuple[str, ...], seed: int) -> dict[str, torch.Tensor] | str:
    """Return what a program leaves on one device, or why it is none."""
    try:
        with loaded(program(features, seed)) as module, tempfile.TemporaryDirectory() as folder:
            found = module.run("auto", 1, folder)
    except Exception:
        return traceback.format_exc().strip()
    if not says_something(found):
        return "values are not finite, or too large"
    return found


class loaded:  # noqa: N801 - it reads as a verb
    """A program as a module, importable by its name while the context lasts."""

    count = 0

    def __init__(self, source: str) -> None:
        type(self).count += 1
        self._module = ModuleType(f"fuzz_program_{self.count}")
        self._source = source

    def __enter__(self) -> Any:
        module, source = self._module, self._source
        filename = f"<{module.__name__}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        sys.modules[module.__name__] = module
        exec(compile(source, filename, "exec"), module.__dict__)
        return module

    def __exit__(self, *_: Any) -> None:
        del sys.modules[self._module.__name__]
        linecache.cache.pop(f"<{self._module.__name__}>", None)


def _on_ranks(
    module: Any, features: Sequence[str], seed: int, scheme: Scheme
) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        if scheme.backend is None:

            def made() -> Any:
                return eval(scheme.source, module.__dict__)

            if not scheme.faults:
                return module.run(made, scheme.num_ranks, folder)
            module.note = lambda *_, **__: None
            with injected_faults(eval(scheme.faults)):
                return module.run(made, scheme.num_ranks, folder)
        try:
            results = run_processes(
                in_a_process,
                scheme.num_ranks,
                timeout_seconds=240,
                features=list(features),
                seed=seed,
                scheme_name=scheme.name,
                folder=folder,
            )
        except ProcessesFailedError as error:
            raise OnProcesses(_told(folder), str(error)) from error
        for _, notes in results:
            module.NOTES.update(notes)
        rest = {name: v for name, v in results[0][0].items() if not name.startswith("note ")}
        return module.noted() | rest


def in_a_process(features: Sequence[str], seed: int, scheme_name: str, folder: str) -> Any:
    """Train on one rank of a launcher's; return what it leaves, and its notes."""
    warnings.simplefilter("ignore")
    scheme = SCHEMES[scheme_name]
    with loaded(program(features, seed)) as module:
        try:
            found = module.run(
                lambda: eval(scheme.source, module.__dict__), scheme.num_ranks, folder
            )
        except BaseException as error:
            told = pickle.dumps(_of_error(error, module.PROGRESS["steps"]))
            Path(folder, f"{os.getpid()}.failed").write_bytes(told)
            raise
        return found, dict(module.NOTES)


class OnProcesses(Exception):  # noqa: N818
    """What processes have raised, as each of them judges it."""

    def __init__(self, told: Sequence[Outcome], text: str) -> None:
        super().__init__(text)
        self.told = told


def _told(folder: str) -> list[Outcome]:
    return [pickle.loads(one.read_bytes()) for one in sorted(Path(folder).glob("*.failed"))]


def _of_error(error: BaseException, num_steps: int) -> Outcome:
    text = "".join(traceback.format_exception(error)).strip()
    if isinstance(error, OnProcesses):
        # Other ranks hear of the one that has refused, and raise what they like.
        refused = any(one.verdict == REFUSED for one in error.told)
        kinds = ", ".join(sorted({one.kind for one in error.told if one.kind}))
        return Outcome(REFUSED, "", text) if refused else Outcome(DEFECT, f"raised {kinds}", text)
    by_lightning = any(part in str(error) for part in BY_LIGHTNING)
    known = isinstance(error, REFUSALS) or by_lightning
    if (known and num_steps == 0) or by_lightning:
        return Outcome(REFUSED, "", str(error))
    what = "refused late" if known else "raised"
    return Outcome(DEFECT, f"{what} {type(error).__name__} {_place(error)}", text)


def _place(error: BaseException) -> str:
    """Return the innermost function of this package, or of any, that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "lightning_shard/" in frame.filename] or frames
    if not ours:
        return ""
    last = ours[-1]
    return f"in {last.filename.rsplit('lightning_shard/', 1)[-1]}:{last.name}"
