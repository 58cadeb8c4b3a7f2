"""Packages that not everyone needs: the extra of this package that installs each, in one line."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

_EXTRAS = {
    "matplotlib": "plots",
    "mpi4py": "mpi",
    "peft": "hf",
    "ray": "ray",
    "shtab": "completion",
    "sklearn": "examples",
    "transformers": "hf",
}
_NOT_FOUND = re.compile(r"(?:No module named '|import of )(\w+)")


def installing(package: str) -> str:
    """Return the command that installs a package with its extra."""
    return f"pip install 'lightning-shard[{_EXTRAS[package]}]'"


def missing(package: str) -> str | None:
    """Say that a package is not installed, and what installs it; None where it is there."""
    if find_spec(package) is not None:
        return None
    return f"{package} is not installed: {installing(package)}"


def missing_in(error: str) -> Iterator[str]:
    """Say what installs the packages that the message of an error of importing names."""
    for package in _NOT_FOUND.findall(error):
        if package in _EXTRAS:
            yield f"{package} is not installed: {installing(package)}"
