"""The suite that every backend passes: the facade's methods, and c10d's on the same group."""

from tests.backends.conformance import (  # noqa: F401 - each registers its checks
    copies,
    ecosystem,
    facade,
    groups,
    in_flight,
    messages,
    objects,
    reductions,
)
from tests.backends.conformance.limits import LIMITS
from tests.backends.conformance.suite import CHECKS

__all__ = ["CHECKS", "LIMITS"]
