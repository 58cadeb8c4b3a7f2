"""The walkthrough, followed to the letter: each command, what it prints, but for the numbers."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from tests.docs.pages import ROOT, blocks
from tests.patience import patient

PAGE = "docs/walkthrough.md"
_NUMBER = re.compile(r"\d[\d,.e+-]*(?:cpu|cu\d+)?")  # of a build of torch, too
_PARAMETER = re.compile(r"'blocks\.[\w.]+'")


def steps() -> list[tuple[str, str]]:
    """Return the commands of the page that are followed by what they print."""
    shown = blocks(PAGE)
    return [
        (command.source, output.source)
        for command, output in pairwise(shown)
        if command.language == "bash" and output.language == "text" and output.follows_directly
    ]


def words(text: str) -> list[str]:
    """Return the words of a text, each number or parameter in it as `#`, units as they are."""
    return [_NUMBER.sub("#", _PARAMETER.sub("#", word)) for word in text.split()]


def follow(command: str, folder: Path, **variables: str) -> str:
    """Run a command as a reader does, in a checkout; return what it prints."""
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"OMP_NUM_THREADS": "1", "PATH": found, "PYTHONPATH": str(folder)}
    run = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
    )
    assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def test_every_command_but_the_installation_is_shown_with_its_output() -> None:
    commands = [block.source for block in blocks(PAGE, "bash")]
    assert commands[0] == "pip install .\n"
    assert [command for command, _ in steps()] == commands[1:]
    assert all(output.strip() for _, output in steps())


def test_a_word_that_is_not_printed_is_noticed() -> None:
    assert words("zero3 on 2 ranks: EQUAL") != words("zero3 on 2 ranks: DIFFERENT")
    assert words("peak 41.1 MiB in 17.2 s") == words("peak 9.7 MiB in 1e-2 s")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("lightning_shard", "examples", "configs"):
        copytree(ROOT / name, checkout / name, ignore=ignore_patterns("__pycache__"))
    for command, expected in steps():
        assert words(follow(command, checkout)) == words(expected), command
