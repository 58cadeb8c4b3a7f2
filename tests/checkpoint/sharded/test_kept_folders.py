"""A folder that an earlier version wrote loads, and training goes on with the same losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint import kept_runs
from tests.checkpoint.sharded.kept_folders import KEPT_LAYOUTS, KEPT_RUNS, strategy_of
from tests.checkpoint.sharded.runs import LAYOUTS, fit
from tests.examples.commands import ignoring_advice

HERE = Path(__file__).parent

pytestmark = ignoring_advice(
    "Be aware that when using `ckpt_path`",
    "The dirpath has changed",
    "You're resuming from a checkpoint that ended before",
)


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("version", ["format_2", "format_3"])
@pytest.mark.parametrize("layout", KEPT_LAYOUTS)
def test_a_folder_of_an_earlier_version_goes_on(layout: str, version: str) -> None:
    kept = HERE / version
    model = fit(LAYOUTS["zero2-2"](), ckpt_path=kept / f"{layout}.ckpt")
    expected = json.loads((kept / "losses.json").read_text())
    torch.testing.assert_close(model.losses, expected, rtol=1e-5, atol=0)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("version", ["format_2", "format_3"])
@pytest.mark.parametrize("run", KEPT_RUNS)
def test_what_ranks_kept_goes_on(run: str, version: str, tmp_path: Path) -> None:
    """In format 2 rank 0 had written it for all, with its means."""
    kept = HERE / version
    expected = json.loads((kept / "losses_of_runs.json").read_text())[run]
    model = kept_runs.fit(strategy_of(run), tmp_path, resume=kept / f"{run}.ckpt")
    torch.testing.assert_close(model.losses, expected, rtol=1e-5, atol=0)
