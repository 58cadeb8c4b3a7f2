"""Read the README and the pages of docs/: their blocks, headings, links, tables and quotes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"(?:\]\(|(?:src|srcset)=\")([^)\s\"]+)[)\"]")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Attributes:
        follows_directly: Whether nothing stands between it and the block before.
    """

    language: str
    source: str
    line: int
    follows_directly: bool


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page, in order; of all languages where none is given."""
    text, end, found = text_of(name), 0, []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        directly = bool(found) and not text[end : match.start()].strip()
        found.append(
            Block(language=match[1], source=match[2], line=line, follows_directly=directly)
        )
        end = match.end()
    return [block for block in found if not languages or block.language in languages]


def prose(name: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCED.sub("", text_of(name))


def quotes(text: str) -> list[str]:
    """Return what stands between backticks in prose."""
    return _INLINE.findall(text)


def links(name: str) -> list[str]:
    """Return where a page's links and pictures lead, but for other hosts."""
    return [to for to in _LINK.findall(prose(name)) if not to.startswith("http")]


def anchors(name: str) -> set[str]:
    """Return the names by which headings are linked to, on GitHub and by mkdocs alike."""
    headings = re.findall(r"^#+ (.+)$", prose(name), flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s", "-", one) for one in words}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a page: the cells of its head and of its rows, and the heading above it."""

    heading: str
    head: list[str]
    rows: list[list[str]]


def tables(name: str) -> Iterator[Table]:
    """Find the tables of a page."""
    heading, lines = "", []
    for line in [*prose(name).splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif lines:
            yield Table(heading=heading, head=lines[0], rows=lines[2:])
            lines = []
