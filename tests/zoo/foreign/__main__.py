"""Write the table of packages: `python -m tests.zoo.foreign --write docs/packages.md`."""

from tests.features.__main__ import main
from tests.zoo.foreign.page import page

if __name__ == "__main__":
    main(page)
