"""All the features: importing the modules that declare them fills the list."""

from tests.features import (  # noqa: F401
    callbacks,
    data,
    entries,
    files,
    flags,
    hooks,
    logged,
    optimizing,
)
from tests.features.declared import FEATURES

__all__ = ["FEATURES"]
