"""The benchmark of the host's work: what it counts, what it fits, and that every arm runs."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import host_overhead
from tests.benchmarks.host_overhead import MAKERS, REFERENCE, SIZES, Fit, Size


def test_a_plane_is_found_and_what_grows_faster_shows() -> None:
    plane = Fit.of({size: 7.0 * size.params + 20 * size.units + 100 for size in SIZES})
    assert plane.per_param == pytest.approx(7)
    assert (plane.per_unit, plane.per_step) == pytest.approx((20, 100))
    assert plane.misfit < 1e-9
    squares = Fit.of({size: float(size.units * size.params_per_unit**2) for size in SIZES})
    assert squares.misfit > 0.05


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_every_stage_is_counted_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    monkeypatch.setattr("sys.argv", ["host_overhead", "--steps=1", f"--json={path}"])
    host_overhead.main()
    found = json.loads(path.read_text())
    assert found["fits"].keys() == MAKERS.keys() - {REFERENCE}
    assert found["fits"]["ddp"]["calls"]["per_param"] == pytest.approx(0, abs=1e-6)
    sizes = [Size(one["units"], one["params_per_unit"]) for one in found["costs"]["zero3"]]
    assert sizes == list(SIZES)
