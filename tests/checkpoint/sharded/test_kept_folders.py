"""A folder that an earlier version wrote loads, and training goes on with the same losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.sharded.kept_folders import KEPT_LAYOUTS
from tests.checkpoint.sharded.runs import LAYOUTS, fit
from tests.examples.commands import ignore_upstream_warnings

KEPT = Path(__file__).parent / "format_2"

pytestmark = [
    *ignore_upstream_warnings,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.mark.parametrize("layout", KEPT_LAYOUTS)
def test_a_folder_of_an_earlier_version_goes_on(layout: str) -> None:
    model = fit(LAYOUTS["zero2-2"](), ckpt_path=KEPT / f"{layout}.ckpt")
    expected = json.loads((KEPT / "losses.json").read_text())
    torch.testing.assert_close(model.losses, expected, rtol=1e-5, atol=0)
