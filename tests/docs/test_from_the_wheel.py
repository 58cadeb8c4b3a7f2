"""README, first pages, walkthrough and recipes, followed to the letter from the built wheel alone.

Each Python that the project allows gets a fresh environment, in which there are the wheel and the
extras that the pages' own commands install. `make test-wheel` takes all of them, and fails for one
that this machine lacks; `make test-all` its own alone: the index may have torch for others with
CUDA, some gigabytes of it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, quotes, tables
from tests.docs.test_walkthrough import PAGE, follow, steps, words
from tests.examples.test_recipes import PAGE as RECIPES
from tests.examples.test_recipes import check_figures, recipes
from tests.test_readme import CONSTRAINTS, PYTHONS

OWN = "{}.{}".format(*sys.version_info)
CASES = [pytest.param(one, marks=[pytest.mark.wheel] if one != OWN else []) for one in PYTHONS]
_INSTALLATION = re.compile(r"pip install '?\.(\[[\w,]+\])?'?")
_OF_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")


def interpreter(version: str) -> str | None:
    """Return the path of a Python on this machine, of which pyenv's shims run only some."""
    own = sorted(map(str, _OF_PYENV.glob(f"{version}.*/bin/python{version}")))
    for path in (shutil.which(f"python{version}"), *own):
        if path and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class Reader:
    """A folder with what a checkout has beside the package, and an environment without it."""

    folder: Path

    def types(self, command: str) -> str:
        """Run a command in the environment; return what it prints."""
        found = f"{self.folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": found, "PYTHONPATH": "", "PIP_CONSTRAINT": str(CONSTRAINTS)}
        return follow(command, self.folder, **own)


@pytest.fixture(scope="module", params=CASES)
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    """Make a reader with one of the Pythons; its environment is large, and goes afterwards."""
    python = interpreter(request.param)
    assert python is not None, f"this machine has no Python {request.param}"
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    subprocess.run([python, "-m", "venv", folder / ".venv"], check=True)
    yield Reader(folder)
    shutil.rmtree(folder)


def commands(page: str) -> Iterator[str]:
    """Yield a page's lines of shell; those of make have an environment of their own."""
    for block in blocks(page, "bash"):
        yield from (line for line in block.source.splitlines() if not line.startswith("make "))


def installing(wheel: Path, command: str) -> str:
    """Return a command in which the checkout is the wheel that was built from it."""
    return _INSTALLATION.sub(lambda found: f"pip install '{wheel}{found[1] or ''}'", command)


def newest(reader: Path) -> str:
    """Return the checkpoint that was written last."""
    saved = reader.glob("lightning_logs/*/checkpoints/*.ckpt")
    return str(max(saved, key=lambda one: one.stat().st_mtime, default=""))


def test_the_pages_install_what_their_commands_need() -> None:
    told = [one for page in ("README.md", "docs/start.md", PAGE) for one in commands(page)]
    installations = [one for one in told if _INSTALLATION.match(one)]
    assert [_INSTALLATION.match(one)[1] for one in installations] == [
        None,
        None,
        "[examples]",
        None,
    ]
    assert installing(Path("a.whl"), "pip install '.[hf]'  # b") == "pip install 'a.whl[hf]'  # b"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_pages_are_followed(reader: Reader, wheel: Path) -> None:
    """What the commands needed came with the extras of developers: safetensors, scikit-learn."""
    done = set[str]()
    for page in ("README.md", "docs/start.md"):
        for line in commands(page):
            command = line.split("  ")[0]
            if command not in done:
                told = installing(wheel, line).replace("some.ckpt", newest(reader.folder))
                reader.types(told)
                done.add(command)
        program = "\n".join(one.source for one in blocks(page, "python"))
        (reader.folder / "page.py").write_text(program)
        reader.types("python page.py")
    for command, expected in steps():
        assert words(reader.types(command)) == words(expected), command


def needs() -> Iterator[tuple[str, str]]:
    """Yield each recipe's name and what its row of the page tells to install, least first."""
    (table,) = (one for one in tables(RECIPES) if one.head[0] == "recipe")
    for _, file, packages in sorted(table.rows, key=lambda row: len(row[-1])):
        yield Path(quotes(file)[0]).stem, " ".join(quotes(packages))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_recipes_are_followed(reader: Reader, wheel: Path) -> None:
    """Each Python's own text of CPython moved losses by an eighth, which the test allowed."""
    for packages, group in groupby(needs(), key=itemgetter(1)):
        reader.types(f"pip install '{wheel}' {packages}")
        for name, _ in group:
            command, shown = recipes()[name]
            check_figures(reader.types(command), shown)
