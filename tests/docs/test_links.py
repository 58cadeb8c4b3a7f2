"""Every link, picture and command of the README and docs/ leads somewhere, also within a page."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from lightning_shard.cli.parsers import LIGHTNINGS, TEXTS
from tests.docs.pages import NAMES, PAGES, README, ROOT, anchors, blocks, links, prose, quotes

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


_STARTS = ("python ", "make ", "lightning-shard ", "mpirun ", "torchrun ", "pytest ", "examples/")
_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands(name: str) -> list[str]:
    lines = [line for block in blocks(name, "bash") for line in block.source.splitlines()]
    found = [*lines, *quotes(prose(name))]
    return [line.partition("  #")[0].strip() for line in found if line.startswith(_STARTS)]


def missing(command: str) -> Iterator[str]:
    """Find what a command names and is not there."""
    yield from set(re.findall(r"^make ([\w-]+)", command)) - _TARGETS
    for module in re.findall(r"python -m ([\w.]+)", command):
        if find_spec(module) is None:
            yield module
    for subcommands in re.findall(r"lightning-shard (\w+(?: \| \w+)*)", command):
        yield from set(subcommands.split(" | ")) - {*LIGHTNINGS, *TEXTS}
    for path in re.findall(r"(?:examples|configs|tests)/[\w./-]+", command):
        if not (ROOT / path).exists():
            yield path


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_what_the_commands_of_a_page_name_is_there(name: str) -> None:
    assert not [(command, what) for command in commands(name) for what in missing(command)]


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "python -m examples.nothing",
        "lightning-shard fit | none",
        "pytest tests/no.py",
    ],
)
def test_what_is_not_there_is_noticed(command: str) -> None:
    assert list(missing(command))


def test_blocks_are_of_languages_that_are_tested_or_that_cannot_run() -> None:
    tested, shown = {"python", "yaml", "bash"}, {"text", "diff"}
    assert {block.language for name in NAMES for block in blocks(name)} == tested | shown
