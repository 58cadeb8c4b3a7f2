"""The README is short and names what there is; what is pinned installs on each Python."""

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import lightning_shard
from tests.docs.pages import README, ROOT, text_of

FIRST_SCREEN = 25


def test_it_fits_on_a_few_screens() -> None:
    assert len(README.read_bytes()) <= 8192


@pytest.mark.parametrize(
    "said",
    [
        "batch size is per data-parallel rank",
        "Python 3.11 or 3.12",
        "Several GPUs have not met this code",
    ],
)
def test_the_first_screen_says(said: str) -> None:
    assert said in "\n".join(text_of("README.md").splitlines()[:FIRST_SCREEN])


def test_the_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.13"' in project
    assert '"torch>=2.11"' in project
    assert '"lightning>=2.6,!=2.6.2,!=2.6.3"' in project


def test_every_strategy_class_has_a_page_in_the_reference() -> None:
    reference = text_of("docs/api.md")
    for name in lightning_shard.__all__:
        assert name.endswith("Error") or f"::: lightning_shard.{name}\n" in reference, name


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
