"""What is optional is installed by an extra, and what lacks it says which in one line."""

import re
import sys
import tomllib

import pytest

from lightning_shard.core import extras
from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"sklearn": "scikit-learn"}


@pytest.mark.parametrize("package", extras._EXTRAS)
def test_each_package_is_in_the_extra_that_is_told(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = str(extras.missing(package))
    assert told.startswith(f"{package} is not installed: pip install 'lightning-shard[")
    listed = OF_EXTRAS[told.split("[")[1].split("]")[0]]
    assert DISTRIBUTIONS.get(package, package) in {re.split(r"\W*[\[>=]", one)[0] for one in listed}


def test_what_is_there_is_not_missing() -> None:
    assert extras.missing("matplotlib") is None


def test_an_error_of_importing_is_told_by_its_package() -> None:
    error = "Problem with 'a.B': No module named 'sklearn.datasets'; No module named 'mine'"
    (told,) = extras.missing_in(error)
    assert told == "sklearn is not installed: pip install 'lightning-shard[examples]'"


def test_no_other_file_of_the_package_names_an_extra() -> None:
    """Seven places spelled the commands themselves, three of them without an extra."""
    files = (ROOT / "lightning_shard").rglob("*.py")
    spelled = {one.name for one in files if "lightning-shard[" in one.read_text()}
    assert spelled == {"extras.py", "ray.py"}
