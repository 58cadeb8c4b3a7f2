"""Versions, as the installed distributions say: nothing is imported to find out."""

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_shard.doctor.finding import Finding, failure, ok

_PACKAGE = "lightning-shard"
_PYTHON = ">=3.11"


def software() -> Iterator[Finding]:
    """Yield the versions of Python and of what this package needs."""
    own = platform.python_version()
    yield _judged("python", own, SpecifierSet(_PYTHON), f"{own} at {sys.executable}")
    for line in requires(_PACKAGE) or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield _installed(wanted)


def _installed(wanted: Requirement) -> Finding:
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return failure(
            wanted.name, "not installed", f"pip install '{wanted.name}{wanted.specifier}'"
        )
    return _judged(wanted.name, found, wanted.specifier, found)


def _judged(name: str, found: str, wanted: SpecifierSet, told: str) -> Finding:
    if wanted.contains(found, prereleases=True):
        return ok(name, told)
    return failure(
        name,
        f"{told}, expected {wanted}",
        "Install Python 3.11 or 3.12." if name == "python" else f"pip install '{name}{wanted}'",
    )
