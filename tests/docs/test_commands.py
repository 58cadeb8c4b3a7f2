"""Commands that the README and docs/ show exist: modules, files, make targets, subcommands."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from lightning_shard.cli.entry import _CONFIGURED, _SUBCOMMANDS
from lightning_shard.cli.parsers import TEXTS
from tests.docs.pages import NAMES, ROOT, blocks, prose, quotes

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
        yield from set(subcommands.split(" | ")) - {*_SUBCOMMANDS, *_CONFIGURED, *TEXTS}
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
