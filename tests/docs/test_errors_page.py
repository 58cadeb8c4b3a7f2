"""Every message that the page of errors quotes stands in the source; every class is explained."""

import ast
import inspect
from collections.abc import Iterator

import lightning_shard.errors
from lightning_shard.errors import ShardError
from tests.docs.pages import ROOT, quotes, tables

PAGE = "docs/errors.md"
BETWEEN = "\0"  # texts that are searched together


def first_cells(head: str) -> list[str]:
    """Return what is quoted in the first column of the page's tables with this head."""
    rows = [row for table in tables(PAGE) if table.head[0] == head for row in table.rows]
    return [quote for row in rows for quote in quotes(row[0])]


def strings() -> Iterator[str]:
    """Find the strings of the package's code, without what is filled in later."""
    for path in (ROOT / "lightning_shard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                yield " ".join("".join(parts).split())


def stands_in(quote: str, texts: str) -> bool:
    """Whether the quote's parts, between its dots, are in one of the texts, in their order."""
    parts = [one.strip() for one in quote.split("...") if one.strip()]
    longest, place = max(parts, key=len), -1
    while (place := texts.find(longest, place + 1)) >= 0:
        end = texts.find(BETWEEN, place)
        text = texts[texts.rfind(BETWEEN, 0, place) + 1 : None if end < 0 else end]
        if _in_order(parts, text):
            return True
    return False


def _in_order(parts: list[str], text: str) -> bool:
    begin = 0
    for part in parts:
        begin = text.find(part, begin)
        if begin < 0:
            return False
        begin += len(part)
    return True


def test_the_quoted_messages_stand_in_the_source() -> None:
    quoted, texts = first_cells("message"), BETWEEN.join(strings())
    assert len(quoted) > 80
    lost = [one for one in quoted if not stands_in(one, texts)]
    assert not lost


def test_a_quote_is_found_by_all_of_its_words_in_their_order() -> None:
    assert stands_in("Rank ...: no ... here", "Rank : no batch here.")
    assert not stands_in("Rank ...: no ... there", "Rank : no batch here.")
    assert not stands_in("here ... Rank", "Rank : no batch here.")
    assert not stands_in("Rank ... here", BETWEEN.join(("Rank 0", "here")))


def test_every_class_is_explained() -> None:
    kinds = {name for name, _ in inspect.getmembers(lightning_shard.errors, inspect.isclass)}
    assert kinds - {ShardError.__name__} == set(first_cells("error"))
