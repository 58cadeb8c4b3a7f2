"""All the uses: importing the modules that declare them fills the list."""

from tests.zoo.foreign import (  # noqa: F401
    cells,
    graphs,
    molecules,
    pictures,
    series,
    tables,
    texts,
)
from tests.zoo.foreign.declared import USES

__all__ = ["USES"]
