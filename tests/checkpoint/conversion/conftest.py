"""One run's checkpoint in both formats, which no test changes."""

from pathlib import Path

import pytest

from tests.checkpoint.sharded.runs import LAYOUTS, saving


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By format, the checkpoint of the second step, on three ranks under ZeRO 3."""
    folder = tmp_path_factory.mktemp("conversion")
    return {
        kind: saving(LAYOUTS["zero3-3"](checkpoint_format=kind), folder / kind)
        for kind in ("full", "sharded")
    }
