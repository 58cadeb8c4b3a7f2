"""All the features: importing the modules that declare them fills the list."""

from tests.features import (  # noqa: F401
    callbacks,
    entries,
    files,
    flags,
    logged,
    training,
)
from tests.features.declared import FEATURES

__all__ = ["FEATURES"]
