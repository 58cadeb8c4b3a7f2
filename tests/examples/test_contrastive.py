"""The contrastive example learns, and its loss is that of the global batch under every stage."""

import pytest

from tests.examples.commands import ignoring_advice, run_example

pytestmark = ignoring_advice()


def loss_after_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> float:
    run_example(monkeypatch, "contrastive", "--trainer.max_epochs=1", *arguments)
    return float(capsys.readouterr().out.split("train loss")[-1])


@pytest.mark.parametrize(
    "stage",
    ["zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("shard_ddp", "zero1", "zero2"))],
)
def test_the_encoder_learns_which_views_are_of_one_image(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = f"--trainer.strategy={stage}_in_process"
    loss = loss_after_an_epoch(monkeypatch, capsys, strategy, "--trainer.devices=2")
    assert loss < 2.5  # by chance log(64) = 4.2: both ranks' 32 images are told apart
