"""The benchmark of idle shares: what it computes, and what it says that it left out."""

from pathlib import Path

import pytest

from tests.benchmarks import bubbles


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["bubbles", *arguments])
    bubbles.main()


def test_idle_shares_beside_theory_and_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--only", "dual_pipe_v", "--most-actions", "256")
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row[1:6]] for row in rows]
    assert cells[:3] == [
        ["2", "4.0% =", "2.0% =", "1.0% =", "0.5% ="],
        ["4", "-", "5.9% =", "3.0% =", "large"],
        ["8", "-", "-", "large", "large"],
    ]


def test_the_tables_left_out_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--only", "gpipe", "--most-actions", "64")
    assert "large: 42 tables of more than 64 computations" in capsys.readouterr().out


def test_the_plot_is_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "bubbles.png"
    run(monkeypatch, "--only", "gpipe", "zbv", "--most-actions", "250", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
