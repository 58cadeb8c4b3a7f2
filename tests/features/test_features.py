"""Every feature of the table, under every strategy: as on one device, or refused by name."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.features.columns import COLUMNS, ONE_DEVICE, QUICK, Here
from tests.features.declared import Feature
from tests.features.network import Report
from tests.features.page import PAGE, page
from tests.features.rows import FEATURES

# Lightning gives advice about much of what a feature is for.
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def on_one_device(feature: Feature) -> Report:
    with TemporaryDirectory() as folder:
        return feature.run(Here(ONE_DEVICE, Path(folder)))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize(
    "column",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COLUMNS],
)
def test_feature(feature: Feature, column: str, tmp_path: Path) -> None:
    feature.check(Here(COLUMNS[column], tmp_path), on_one_device)


def test_the_page_of_the_documentation_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.features --write docs/features.md"
