"""What `constraints.txt` pins can be installed on each Python that the project promises."""

import re
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
OLDEST = "3.11.0"
CHECKED_AT_LEAST = 50


def test_a_pinned_package_refused_the_python_of_a_distribution() -> None:
    """Debian 12 has 3.11.2, and `make demo` ended there: a package of the docs wanted 3.11.5."""
    pinned = set(re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text().lower(), re.MULTILINE))
    wanted = {
        one.name.lower(): SpecifierSet(one.metadata.get("Requires-Python") or "")
        for one in distributions()
    }
    checked = wanted.keys() & pinned
    assert len(checked) > CHECKED_AT_LEAST
    assert [name for name in checked if not wanted[name].contains(OLDEST)] == []
