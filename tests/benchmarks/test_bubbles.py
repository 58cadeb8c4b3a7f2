"""The benchmark of idle shares: what it computes, and what it says that it left out."""

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
