"""Where there is no SLURM, and none can be fetched, the tests of it fail and say what to do."""

from pathlib import Path

import pytest

from tests.hosts import slurm


def test_slurm_that_is_missing_is_no_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # neither srun nor apt-get
    monkeypatch.setattr(slurm, "_UNPACKED", tmp_path / "slurm")
    slurm.programs.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="install slurm-wlm and munge, or run `make"):
        slurm.programs()
    assert not (tmp_path / "slurm").exists()
