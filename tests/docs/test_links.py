"""Every link and picture of the README and docs/ leads somewhere, also within a page."""

import re

import pytest

from tests.docs.pages import NAMES, PAGES, README, ROOT, anchors, links, prose, quotes

_PATH = re.compile(r"(?:docs|examples|configs|tests|lightning_shard)/[\w./-]*\w/?")


def leads_somewhere(name: str, to: str) -> bool:
    path, _, anchor = to.partition("#")
    target = (ROOT / name).parent / path if path else ROOT / name
    if not target.exists():
        return False
    return not anchor or anchor in anchors(str(target.resolve().relative_to(ROOT.resolve())))


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    assert not [to for to in links(name) if not leads_somewhere(name, to)]


def test_a_wrong_link_is_noticed() -> None:
    assert leads_somewhere("README.md", "docs/zero3.md#limits")
    assert not leads_somewhere("README.md", "docs/zero3.md#none")
    assert not leads_somewhere("README.md", "docs/none.md")


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_are_quoted_exist(name: str) -> None:
    found = [path for quote in quotes(prose(name)) for path in _PATH.findall(quote)]
    assert not [path for path in found if not (ROOT / path).exists()]


def test_the_navigation_has_every_page() -> None:
    navigation = (ROOT / ".mkdocs.yml").read_text().split("nav:")[1]
    pages = re.findall(r"([\w./]+\.md)", navigation)
    assert sorted(pages) == sorted(path.name for path in PAGES if path != README)


def test_some_page_leads_to_every_page() -> None:
    linked = {to.partition("#")[0].removeprefix("docs/") for name in NAMES for to in links(name)}
    assert {path.name for path in PAGES if path != README} - {"index.md"} <= linked
