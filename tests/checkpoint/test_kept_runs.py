"""A checkpoint that an earlier version wrote loads, and training goes on with the same losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.kept_runs import NUM_STEPS, RUNS, SAVED_AFTER, Regressor, fit
from tests.examples.commands import ignore_upstream_warnings

KEPT = Path(__file__).parent / "format_1"
LOSSES = json.loads((KEPT / "losses.json").read_text())

pytestmark = [
    *ignore_upstream_warnings,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def test_every_run_has_a_file() -> None:
    assert {path.stem for path in KEPT.glob("*.ckpt")} == set(RUNS) == set(LOSSES)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_an_earlier_version_goes_on(name: str, tmp_path: Path) -> None:
    model = fit(RUNS[name](), tmp_path, resume=KEPT / f"{name}.ckpt")
    assert len(model.losses) == NUM_STEPS - SAVED_AFTER
    rtol = 0.5 if name == "async_sgd" else 1e-5  # whose gradients arrive in any order
    torch.testing.assert_close(model.losses, LOSSES[name], rtol=rtol, atol=0)


def test_a_checkpoint_of_an_earlier_version_loads_without_a_strategy() -> None:
    for path in KEPT.glob("*.ckpt"):
        Regressor().load_state_dict(torch.load(path, weights_only=False)["state_dict"])
