"""The digits example reaches its accuracy under every stage."""

import pytest

from tests.examples.commands import ignoring_advice, run_example

pytestmark = ignoring_advice()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("shard_ddp", marks=pytest.mark.slow),
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "zero3",
    ],
)
def test_more_than_95_percent_of_the_test_images_are_read_right(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = f"--trainer.strategy={stage}_in_process"
    run_example(monkeypatch, "train_digits", strategy, "--trainer.devices=2")
    row = next(r for r in capsys.readouterr().out.splitlines() if "test_accuracy" in r)
    assert float(row.split()[-2]) > 0.95
