"""The example of three dimensions draws its mesh, trains, and says what each rank holds."""

import runpy

import pytest

from tests.examples.commands import ignoring_advice, largest_shares, last_losses, set_arguments

pytestmark = ignoring_advice()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--stages=2", "--tensor=2", "--data=1", "--zero-stage=1"],
        pytest.param(["--stages=2", "--tensor=2", "--data=2"], marks=pytest.mark.slow),
    ],
)
def test_a_gpt_in_three_dimensions(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_arguments(monkeypatch, "train_gpt_3d.py", "--steps=2", *options)
    runpy.run_module("examples.train_gpt_3d", run_name="__main__")
    output = capsys.readouterr().out
    assert "stage 0" in output
    assert "stage 1" in output
    loss, bigram = last_losses(output)
    assert bigram < loss < 8.0
    assert float(largest_shares(output)[0].rstrip("%")) < 28
