"""Every feature of the table, under every strategy: as on one device, or refused by name."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_shard.errors import ShardError
from tests.features.columns import COLUMNS, ONE_DEVICE, QUICK, Here
from tests.features.declared import Comparison, Feature
from tests.features.network import Report
from tests.features.page import PAGE, page
from tests.features.rows import FEATURES

# Ours, and Lightning's own of what it does not do with several ranks, whatever the strategy.
REFUSALS = (ShardError, MisconfigurationException, ValueError, RuntimeError)
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
    here = Here(COLUMNS[column], tmp_path)
    if column in feature.refused:
        with pytest.raises(REFUSALS, match=feature.refused[column]):
            feature.run(here)
        return
    expected = on_one_device(feature)
    comparison = Comparison(rtol=feature.rtol, own=column in feature.own)
    if column in feature.broken:
        with pytest.raises(Exception, match=feature.broken[column]):
            comparison.check(feature.run(here), expected)
        return
    comparison.check(feature.run(here), expected)


def test_the_page_of_the_documentation_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.features --write docs/features.md"
