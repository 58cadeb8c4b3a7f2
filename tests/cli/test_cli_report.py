"""`lightning-shard report`, inside this process and in one of its own."""

from pathlib import Path

import pytest

from lightning_shard.cli import main
from tests.core.reporting.runs import whole_run, write
from tests.examples.commands import set_arguments
from tests.processes import run_alone


def test_the_page_is_made_and_its_path_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    write(tmp_path / "run", whole_run())
    set_arguments(monkeypatch, "lightning-shard", "report", str(tmp_path / "run"))
    assert main() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    set_arguments(
        monkeypatch, "lightning-shard", "report", str(tmp_path / "run"), f"--output={page}"
    )
    assert main() == 0
    assert page.is_file()


def test_two_runs_are_laid_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write(tmp_path / name, whole_run())) for name in "ab"]
    set_arguments(monkeypatch, "lightning-shard", "report", *folders)
    assert main() == 0
    page = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert all(f"training, {one}" in page for one in folders)


def test_a_folder_of_no_run_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_arguments(monkeypatch, "lightning-shard", "report", str(tmp_path))
    assert main() == 1
    told = capsys.readouterr().err
    assert told.startswith("lightning-shard: ConfigError:")
    assert told.count("\n") == 1


_REPORT = """
import sys
from lightning_shard.cli import main
sys.argv = ["lightning-shard", "report", sys.argv[1]]
assert main() == 0
assert not {"torch", "lightning", "numpy"} & sys.modules.keys()
"""


def test_torch_is_not_imported(tmp_path: Path) -> None:
    write(tmp_path, whole_run())
    run = run_alone("-c", _REPORT, str(tmp_path))
    assert run.returncode == 0, run.output
