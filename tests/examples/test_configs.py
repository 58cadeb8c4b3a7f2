"""Files in configs/ hold, print and end with what they promise; all run in test_every_config."""

from pathlib import Path

import pytest

from lightning_shard.core.reporting.page import write_report
from tests.examples.commands import (
    REPOSITORY,
    ignoring_advice,
    largest_shares,
    last_losses,
    run_command,
    run_example,
)

pytestmark = ignoring_advice()


def test_the_demo_prints_the_table_the_losses_and_a_sample_and_can_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = f"--config={REPOSITORY / 'configs' / 'gpt_demo.yaml'}"
    run_example(
        monkeypatch, "train_gpt", config, "--trainer.max_steps=3", "--trainer.limit_val_batches=2"
    )
    output = capsys.readouterr().out
    assert largest_shares(output) == ["25.0%"] * 4
    assert "bigram model" in output
    assert "a sample:\n\nThe " in output
    page = write_report(tmp_path / "build" / "demo").read_text()
    assert "zero3 on 4 ranks" in page
    assert "Finished." in page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_demo_ends_far_below_the_bigram_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run_example(monkeypatch, "train_gpt", f"--config={REPOSITORY / 'configs' / 'gpt_demo.yaml'}")
    loss, bigram = last_losses(capsys.readouterr().out)
    assert loss < 0.8 * bigram


@pytest.mark.slow
def test_gpt_zero3_over_gloo_prints_the_table(tmp_path: Path) -> None:
    run = run_command(tmp_path, "fit", "--config=configs/gpt_zero3.yaml", "--trainer.max_steps=3")
    assert run.returncode == 0, run.stderr
    assert largest_shares(run.stdout) == ["50.0%"] * 4


@pytest.mark.slow
def test_gpt_tensor_parallel_over_gloo_holds_about_half(tmp_path: Path) -> None:
    config = "--config=configs/gpt_tensor_parallel.yaml"
    run = run_command(tmp_path, "fit", config, "--trainer.max_steps=3")
    assert run.returncode == 0, run.stderr
    assert all(50.0 <= float(share.rstrip("%")) < 55.0 for share in largest_shares(run.stdout))


@pytest.mark.slow
def test_gpt_pipeline_parallel_over_gloo_trains_and_validates(tmp_path: Path) -> None:
    config = "--config=configs/gpt_pipeline_parallel.yaml"
    limits = ["--trainer.max_steps=3", "--trainer.limit_val_batches=2"]
    run = run_command(tmp_path, "fit", config, *limits, "--trainer.val_check_interval=3")
    assert run.returncode == 0, run.stderr
    loss, bigram = last_losses(run.stdout)
    assert bigram < loss < 8.0


@pytest.mark.slow
def test_gpt_3d_holds_a_quarter_on_each_rank(tmp_path: Path) -> None:
    limits = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    run = run_command(tmp_path, "fit", "--config=configs/gpt_3d.yaml", *limits)
    assert run.returncode == 0, run.stderr
    parameters, gradients, state, _ = map(percent, largest_shares(run.stdout))
    assert 25 <= parameters < 28
    assert 25 <= gradients < 28
    assert 12.5 <= state < 14  # halved once more, between the two models


def percent(share: str) -> float:
    return float(share.rstrip("%"))


@pytest.mark.slow
@pytest.mark.timeout(240)  # two commands of two processes each
def test_digits_zero2_over_gloo_is_tested_from_its_own_checkpoint(tmp_path: Path) -> None:
    config = "--config=configs/digits_zero2.yaml"
    fit = run_command(tmp_path, "fit", config, "--trainer.max_epochs=3")
    assert fit.returncode == 0, fit.stderr
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    test = run_command(tmp_path, "test", config, f"--ckpt_path={checkpoint}")
    assert test.returncode == 0, test.stderr
    assert "test_accuracy" in test.stdout
