"""Every package under every strategy, through its own API: as on one device, or refused by name."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.features.columns import ONE_DEVICE, Here
from tests.features.declared import Feature
from tests.features.network import Report
from tests.zoo.foreign.declared import STRATEGIES, Use
from tests.zoo.foreign.page import PAGE, page
from tests.zoo.foreign.rows import USES


@cache
def on_one_device(use: Feature) -> Report:
    with TemporaryDirectory() as folder:
        return use.run(Here(ONE_DEVICE, Path(folder)))


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.timeout(600)  # the first import of these packages takes long
@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.group} {use.name}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_package(use: Use, strategy: str, tmp_path: Path) -> None:
    use.check(use.here(strategy, tmp_path), on_one_device)


def test_the_page_of_the_documentation_is_current() -> None:
    expected = "run: python -m tests.zoo.foreign --write docs/packages.md"
    assert PAGE.read_text() == page(), expected
