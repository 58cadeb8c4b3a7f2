"""Each word of the glossary leads to a page that explains it, and other pages link the word."""

import re

import pytest

from tests.docs.pages import NAMES, links, text_of
from tests.docs.test_links import leads_somewhere

GLOSSARY = "docs/glossary.md"
_ENTRY = re.compile(r"^### ([^\n]+)\n\n(.+?)(?=\n\n#|\Z)", flags=re.MULTILINE | re.DOTALL)
ENTRIES = dict(_ENTRY.findall(text_of(GLOSSARY)))
_LINK = re.compile(r"\]\(([^)]+)\)")
LINKED = {
    to.partition("#")[2]
    for name in NAMES
    if name != GLOSSARY
    for to in links(name)
    if to.partition("#")[0].endswith("glossary.md")
}


def anchor(word: str) -> str:
    return word.lower().replace(" ", "-")


def test_the_words_that_newcomers_ask_for_are_there() -> None:
    assert {"Unit", "Mesh", "Block", "Passing", "Rank", "Shard", "Dry run"} <= ENTRIES.keys()


@pytest.mark.parametrize("word", ENTRIES)
def test_a_word_leads_to_a_page_that_has_it(word: str) -> None:
    to = _LINK.findall(ENTRIES[word].partition("More:")[2])
    assert to
    assert all(leads_somewhere(GLOSSARY, one) for one in to)
    pages = [text_of(f"docs/{one.partition('#')[0]}").lower() for one in to]
    assert any(word.lower().split()[-1] in page for page in pages)


@pytest.mark.parametrize("word", ENTRIES)
def test_some_page_links_a_word_to_its_entry(word: str) -> None:
    assert anchor(word) in LINKED


def test_the_words_of_a_group_stand_once() -> None:
    words = re.findall(r"^### (.+)$", text_of(GLOSSARY), flags=re.MULTILINE)
    assert len(words) == len(set(words)) == len(ENTRIES)
