"""A fit may end with parameters in shards: saving, evaluating and going on work from there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_processes
from tests.strategies.left_in_shards import SCHEMES, content, fit_twice, full_fit, left_fit

QUICK = ["zero3", "hybrid-zero3"]
CASES = [
    pytest.param(scheme, marks=() if scheme in QUICK else pytest.mark.slow) for scheme in SCHEMES
]


def assert_same(found: Any, expected: Any) -> None:
    """Compare two checkpoints to the bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", CASES)
def test_a_fit_that_leaves_shards_saves_and_goes_on_as_one_that_gathers(
    scheme: str, tmp_path: Path
) -> None:
    num_ranks, _ = SCHEMES[scheme]
    found = run_processes(left_fit, num_ranks, scheme=scheme, folder=tmp_path, kind="full")
    expected = run_processes(full_fit, num_ranks, scheme=scheme, folder=tmp_path)
    left = content(tmp_path / "left.ckpt")
    assert_same(left, content(tmp_path / "full.ckpt"))
    assert_same(content(tmp_path / "again.ckpt"), left)
    assert_same(content(tmp_path / "resumed.ckpt"), content(tmp_path / "once.ckpt"))
    for rank in range(num_ranks):
        assert found[rank]["validated"] == expected[rank]["validated"]
        assert all("trainer.save_checkpoint" in one for one in found[rank]["refusals"])
        assert found[rank]["grown"] == 0


@pytest.mark.parametrize("scheme", CASES)
def test_a_second_fit_goes_on_from_shards(scheme: str) -> None:
    num_ranks, _ = SCHEMES[scheme]
    found = run_processes(fit_twice, num_ranks, scheme=scheme, left=True)
    expected = run_processes(fit_twice, num_ranks, scheme=scheme, left=False)
    for one, other in zip(found, expected, strict=True):
        assert_same(one[0], other[0])
        assert one[1] == other[1]
