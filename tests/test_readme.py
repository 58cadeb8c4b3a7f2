"""The README is short and names what there is; what is pinned installs on each Python."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import lightning_shard
from tests.docs.pages import README, ROOT, quotes, tables, text_of

FIRST_SCREEN = 25


def test_it_fits_on_a_few_screens() -> None:
    assert len(README.read_bytes()) <= 8192


@pytest.mark.parametrize(
    "said",
    [
        "batch size is per data-parallel rank",
        "Python 3.11 to 3.13",
        "Several GPUs have not met this code",
    ],
)
def test_the_first_screen_says(said: str) -> None:
    assert said in "\n".join(text_of("README.md").splitlines()[:FIRST_SCREEN])


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PYTHON = "Programming Language :: Python :: "
PYTHONS = [one.removeprefix(_PYTHON) for one in PROJECT["classifiers"] if _PYTHON in one]
_VERSION = re.compile(r"\d+(?:\.\d+)+")


def rows(head: str) -> dict[str, list[str]]:
    """Return the other cells by the first one's of a table of the first page."""
    (table,) = (
        one for one in tables("docs/start.md") if one.head[0] == head and len(one.head) == 3
    )
    return {row[0]: row[1:] for row in table.rows}


def test_the_table_of_versions_is_that_of_the_project() -> None:
    told = {name: {*_VERSION.findall(supported)} for name, (supported, _) in rows("").items()}
    after_last = f"3.{int(PYTHONS[-1][2:]) + 1}"
    assert PROJECT["requires-python"] == f">={PYTHONS[0]},<{after_last}"
    assert told.pop("Python") == {*PYTHONS}
    needed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hf"]
    wanted = {one.name: str(one.specifier) for one in map(Requirement, needed)}
    assert told == {name: {*_VERSION.findall(wanted[name.lower()])} for name in told}


def test_what_is_tested_with_is_what_is_pinned() -> None:
    pinned = CONSTRAINTS.read_text()
    for name, (_, tested) in rows("").items():
        if name != "Python":
            assert f"\n{name.lower()}=={_VERSION.findall(tested)[0]}\n" in pinned, name


def test_the_table_of_extras_is_that_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    told = {
        quotes(extra)[0]: set(brings.split(", ")) for extra, (brings, _) in rows("extra").items()
    }
    assert told == {name: {Requirement(one).name for one in extras[name]} for name in told}
    assert extras.keys() - told.keys() == {"browser", "dev", "notebook", "zoo"}  # of `make`


def test_every_strategy_class_has_a_page_in_the_reference() -> None:
    reference = text_of("docs/api.md")
    for name in lightning_shard.__all__:
        stands = f"::: lightning_shard.{name}\n" in reference or f"\n### {name}\n" in reference
        assert name.endswith("Error") or stands, name


CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
OLDEST = "3.11.0"
CHECKED_AT_LEAST = 50


def test_no_pinned_package_refuses_the_python_of_a_distribution() -> None:
    """Debian 12 has 3.11.2, and `make demo` ended there: a package of the docs wanted 3.11.5."""
    pinned = set(re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text().lower(), re.MULTILINE))
    wanted = {
        one.name.lower(): SpecifierSet(one.metadata.get("Requires-Python") or "")
        for one in distributions()
    }
    checked = wanted.keys() & pinned
    assert len(checked) > CHECKED_AT_LEAST
    assert [name for name in checked if not wanted[name].contains(OLDEST)] == []
