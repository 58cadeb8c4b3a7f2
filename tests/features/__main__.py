"""Write the table of features: `python -m tests.features --write docs/features.md`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tests.features.page import page


def main(page: Callable[[], str]) -> None:
    """Write a page to a file, or print it."""
    parser = argparse.ArgumentParser(description="Writes a table of the documentation.")
    parser.add_argument("--write", type=Path, metavar="FILE")
    written = parser.parse_args().write
    if written is None:
        print(page())
    else:
        written.parent.mkdir(exist_ok=True)
        written.write_text(page())


if __name__ == "__main__":
    main(page)
