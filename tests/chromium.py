"""A headless Chromium, for tests that look at pages; without one they fail and say so."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def headless_chromium(looked_at: str) -> Iterator[Any]:
    """Yield the browser, which runs while the context does."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.fail(f"{looked_at} is looked at in Chromium: apt-get install chromium.")
    if find_spec("playwright") is None:
        pytest.fail(f"{looked_at} is looked at with playwright: pip install playwright.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
