"""No test decides in which order another assigns samples, or which rank it takes itself for."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as rank zero, without a seed in the environment."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    process = cast(Any, rank_zero_only)
    process.rank = 0
    yield
    process.rank = 0
