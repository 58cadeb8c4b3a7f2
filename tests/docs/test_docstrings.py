"""The entries of docstrings say what a thing is, in words that need no look at the body."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent
_SECTION = re.compile(r"(\w+):")
_ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ?(.*)")
_LISTING = ("Args", "Attributes")
_FEWEST_WORDS = 3
_RIDDLES = ("Whose", "Of ", "As well", "Likewise")  # "`rank`: Whose." has no subject


def test_every_entry_of_a_docstring_says_what_the_thing_is() -> None:
    riddles = [
        f"{path.relative_to(PACKAGE)}: {owner}: {name}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for owner, name, text in _entries_of(path.read_text(encoding="utf-8"))
        if _is_riddle(text)
    ]

    assert not riddles, "\n".join(
        [f"{len(riddles)} entries say too little: at least {_FEWEST_WORDS} words each.", *riddles]
    )


def test_riddles_are_found() -> None:
    source = '''
class Box:
    """A box.

    Attributes:
        rank: Whose.
        size: Number of ranks.
    """

    def put(self, value, *args):
        """Put a value in.

        Args:
            value: Of the
                caller's own making, which is long enough.
            *args: Likewise, and further arguments.

        Returns:
            None: nothing.
        """
'''

    found = [(owner, name) for owner, name, text in _entries_of(source) if _is_riddle(text)]

    assert found == [("Box", "rank"), ("Box.put", "value"), ("Box.put", "*args")]


def _is_riddle(text: str) -> bool:
    return len(text.split()) < _FEWEST_WORDS or text.startswith(_RIDDLES)


def _entries_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted name of each class or function with each entry's name and text."""
    for owner, node in _documented(ast.parse(source), ""):
        for name, text in _entries(ast.get_docstring(node) or ""):
            yield owner, name, text


def _documented(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in _statements(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
            yield from _documented(child, f"{prefix}{child.name}.")
        else:
            yield from _documented(child, prefix)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node; expressions, which hold most nodes, have no docstrings."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        yield from getattr(node, block, ())


def _entries(docstring: str) -> list[tuple[str, str]]:
    """Return the entries of a docstring's lists: name, and text in one line."""
    section, found = "", list[tuple[str, str]]()
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            heading = _SECTION.fullmatch(line)
            section = heading[1] if heading else ""
        elif section in _LISTING and (entry := _ENTRY.fullmatch(line)):
            found.append((entry[1], entry[2]))
        elif section in _LISTING and found and line.strip():
            name, text = found[-1]
            found[-1] = (name, f"{text} {line.strip()}".strip())
    return found
