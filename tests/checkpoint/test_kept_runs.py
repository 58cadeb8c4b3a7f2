"""A checkpoint that an earlier version wrote loads, and training goes on with the same losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.kept_runs import NUM_STEPS, RUNS, SAVED_AFTER, Regressor, fit
from tests.examples.commands import ignoring_advice

FORMATS = (1, 2, 3)
KEPT = {
    number: Path(__file__).parent / name
    for number, name in zip(FORMATS, ("format_1", "format_2_full", "format_3_full"), strict=True)
}

pytestmark = ignoring_advice("The dirpath has changed")


def losses(number: int) -> dict[str, list[float]]:
    """Return the losses that go on from the checkpoints of a format, by run."""
    read: dict[str, list[float]] = json.loads((KEPT[number] / "losses.json").read_text())
    return read


@pytest.mark.parametrize("number", FORMATS)
def test_every_run_has_a_file(number: int) -> None:
    names = {path.stem for path in KEPT[number].glob("*.ckpt")}
    assert names == set(RUNS) == set(losses(number))


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("number", FORMATS)
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_an_earlier_version_goes_on(name: str, number: int, tmp_path: Path) -> None:
    model = fit(RUNS[name](), tmp_path, resume=KEPT[number] / f"{name}.ckpt")
    assert len(model.losses) == NUM_STEPS - SAVED_AFTER
    rtol = 0.5 if name == "async_sgd" else 1e-5  # whose gradients arrive in any order
    torch.testing.assert_close(model.losses, losses(number)[name], rtol=rtol, atol=0)


def test_a_checkpoint_of_an_earlier_version_loads_without_a_strategy() -> None:
    for path in (one for folder in KEPT.values() for one in folder.glob("*.ckpt")):
        Regressor().load_state_dict(torch.load(path, weights_only=False)["state_dict"])
