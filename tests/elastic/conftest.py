"""Fits of earlier tests must not decide in which order samples are dealt."""

import pytest


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what `seed_everything` has left in the environment."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
