"""The dry run of the 100B-parameter GPT, as its users start it."""

import runpy

import pytest

from tests.examples.commands import REPOSITORY, set_arguments


def test_it_prints_a_row_for_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(REPOSITORY / "examples" / "dry_run_100b.py")
    options = {"num-layers": 4, "stages": 2, "tensor": 8, "world": 4096, "num-microbatches": 4}
    set_arguments(monkeypatch, path, *(f"--{name}={value}" for name, value in options.items()))
    runpy.run_path(path, run_name="__main__")
    output = capsys.readouterr().out
    assert "parameters on 4,096 ranks: pp 2, dp 256, tp 8, ZeRO stage 1" in output
    assert "1f1b, 4 microbatches, 1,024 samples a step; idle 20.0%" in output
    rows = [line.split()[0] for line in output.splitlines() if "GiB" in line]
    assert rows == ["0", "1", "least", "most"]
