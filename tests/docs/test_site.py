"""The built site in a browser, opened as files: search, the switch, phones, and pictures' words."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import headless_chromium
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_chromium("The site") as chromium:
        yield chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = ("mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", "--site-dir", folder)
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, env=quiet)
    return folder


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A window of the parametrized width and scheme, which asks no other host and logs nothing."""
    width, scheme = getattr(request, "param", (1300, "light"))
    window = {"width": width, "height": 900}
    context = browser.new_context(color_scheme=scheme, viewport=window, offline=True)
    context.set_default_timeout(120_000)
    page, elsewhere, messages = context.new_page(), [], []
    page.on("request", lambda one: one.url.startswith("http") and elsewhere.append(one.url))
    page.on("console", lambda one: messages.append(one.text))
    page.on("pageerror", lambda one: messages.append(str(one)))
    yield page
    context.close()
    assert elsewhere == []
    assert messages == []


@pytest.mark.parametrize("page", [(390, "light"), (1000, "dark")], indirect=True)
def test_no_page_is_wider_than_the_window(page: Any, site: Path) -> None:
    wide = []
    for source in sorted((ROOT / "docs").glob("*.md")):
        page.goto((site / f"{source.stem}.html").as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(source.stem)
    assert wide == []


@pytest.mark.parametrize("page", [(390, "light")], indirect=True)
def test_a_table_scrolls_in_its_own_box_on_a_phone(page: Any, site: Path) -> None:
    page.goto((site / "strategies.html").as_uri())
    table = page.locator(".md-typeset__scrollwrap").first
    assert table.evaluate("one => getComputedStyle(one).overflowX") == "auto"
    assert table.evaluate("one => one.scrollWidth > one.clientWidth")


def test_pages_that_are_opened_as_files_can_be_searched(page: Any, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.locator("[data-md-component=search-query]").fill("reconfiguration")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    assert "elastic.html" in found.get_attribute("href")


def test_pictures_follow_the_switch_of_light_and_dark(page: Any, site: Path) -> None:
    page.goto((site / "zero3.html").as_uri())
    shown = []
    for _ in range(3):
        page.locator("[data-md-component=palette] label:visible").click()
        dark = page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        picture = page.locator("picture img").evaluate("one => one.currentSrc")
        shown.append((dark, picture.rpartition("/")[2]))
    light = (False, "zero3-light.svg")
    assert shown == [light, (True, "zero3-dark.svg"), light]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_no_word_of_a_picture_is_cut(picture: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(picture.as_uri())
    cut = page.evaluate(
        """() => {
            const [, , width, height] = document.documentElement.getAttribute("viewBox").split(" ");
            return [...document.querySelectorAll("text")].filter((one) => {
                const box = one.getBBox();
                const down = box.y + box.height;
                return box.x < 0 || box.y < 0 || box.x + box.width > +width || down > +height;
            }).map((one) => one.textContent);
        }"""
    )
    page.close()
    assert cut == []
