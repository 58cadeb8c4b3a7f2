"""The page of launchers says what was measured; without SLURM its tests fail and say what to do."""

from pathlib import Path

import pytest

from tests.hosts import slurm
from tests.hosts.launching import LAUNCHERS
from tests.hosts.page import PAGE, TOLERANCE, WITHOUT, cell, cells_of, page
from tests.hosts.schemes import SCHEMES


def test_the_page_is_as_it_was_written() -> None:
    assert page(cells_of(PAGE.read_text())) == PAGE.read_text()


def test_every_scheme_ran_under_every_launcher() -> None:
    cells = cells_of(PAGE.read_text())
    assert {one for one, text in cells.items() if text == "-"} == WITHOUT
    assert set(cells) == {(scheme, launcher) for scheme in SCHEMES for launcher in LAUNCHERS}
    assert all(float(text) <= TOLERANCE for text in cells.values() if text != "-")


@pytest.mark.parametrize(
    ("difference", "text"), [(None, "-"), (0.0, "0"), (1.04e-7, "1e-07"), (9.6e-6, "1e-05")]
)
def test_a_cell(difference: float | None, text: str) -> None:
    assert cell(difference) == text


def test_slurm_that_is_missing_is_no_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # neither srun nor apt-get
    monkeypatch.setattr(slurm, "_UNPACKED", tmp_path / "slurm")
    slurm.programs.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="install slurm-wlm and munge, or run `make"):
        slurm.programs()
    assert not (tmp_path / "slurm").exists()
