"""The page in a browser: no message, no request, nothing wider than the window, light and dark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.core.reporting.page import SECTIONS, write_report
from tests.chromium import headless_chromium
from tests.core.reporting.runs import whole_run, write, write_timeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_chromium("The report") as chromium:
        yield chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = whole_run(num_steps=60)
    for one in records:
        if one["kind"] == "step":
            one |= {"learning_rate": 0.1 / one["step"], "grad_norm": 2.0}
    folder = write(tmp_path_factory.mktemp("run"), records)
    row = '{"recommendation": {"memory": {"parameters": 4096, "activations": 70000}}}'
    (folder / "plan.json").write_text(row)
    write_timeline(folder)
    return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 390])
def test_the_page_is_shown_without_a_message_or_a_request(
    scheme: Any, width: int, report: Path, browser: Any
) -> None:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True
    )
    page, requests, messages = context.new_page(), [], []
    page.on("request", lambda one: requests.append(one.url))
    page.on("console", lambda one: messages.append(one.text))
    page.on("pageerror", lambda one: messages.append(str(one)))
    page.goto(report.as_uri())
    assert page.locator("section").count() == len(SECTIONS)
    for number in range(page.locator("svg").count()):
        box = page.locator("svg").nth(number).bounding_box()
        assert box["width"] > 300
        assert box["height"] > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    text = page.locator("svg .axis").first
    size = text.evaluate("e => e.getBoundingClientRect().height")
    assert size > 9  # a phone scrolls drawings, whose text would be 5 pixels high
    assert requests == [report.as_uri()]
    assert messages == []
    back, text = (
        _brightness(page.evaluate(f"getComputedStyle(document.body).{name}"))
        for name in ("backgroundColor", "color")
    )
    assert (back > 200 and text < 80) if scheme == "light" else (back < 80 and text > 180)
    context.close()


def test_marks_have_the_colours_of_their_legend(report: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    for number in range(3):
        mark = page.locator(f"#steps rect.s{number}").first.evaluate(
            "e => getComputedStyle(e).fill"
        )
        named = page.locator(f"#steps i.s{number}").evaluate(
            "e => getComputedStyle(e).backgroundColor"
        )
        assert mark == named != "rgb(0, 0, 0)"


def _brightness(colour: str) -> float:
    """Return the mean of the three parts of a colour such as rgb(18, 22, 28)."""
    parts = [float(one) for one in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(parts) / 3
