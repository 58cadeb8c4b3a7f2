"""`lightning-shard prove`: configurations, exit codes, JSON."""

import json
import sys
from pathlib import Path

import pytest

from examples.train_gpt import GPT
from lightning_shard.cli import main
from tests.examples.commands import REPOSITORY, ignoring_advice, set_arguments

pytestmark = ignoring_advice()
# gpt_demo.yaml is of the example's own command line, and names no class.
CONFIGS = sorted({one.name for one in (REPOSITORY / "configs").glob("*.yaml")} - {"gpt_demo.yaml"})
DIFFER_BY_DESIGN = {"gpt_async_sgd.yaml", "gpt_compression.yaml", "gpt_local_sgd.yaml"}
SMALL = ("--model.num_layers=2", "--model.width=16", "--data.batch_size=4", "--steps=2")


class ScaledByRanks(GPT):
    """Takes the number of ranks into its loss."""

    def training_step(self, batch: list, batch_idx: int) -> object:
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class Command:
    """The command line, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, config: str, *arguments: str) -> int:
        path = REPOSITORY / "configs" / config
        set_arguments(self.monkeypatch, "lightning-shard", "prove", f"--config={path}", *arguments)
        return main()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(REPOSITORY)
    return Command(monkeypatch)


def test_an_equal_run(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("gpt_zero3.yaml", *SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("zero3 on 2 ranks: EQUAL")
    assert "'train_loss' is logged at each step" in printed


@pytest.mark.slow
def test_a_mistake_as_json(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"--model={__name__}.{ScaledByRanks.__name__}"
    assert command("gpt_zero3.yaml", model, *SMALL, "--json", "--ranks=3") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["cause"]["name"] == "number of ranks"
    assert told["ranks"] == 3
    assert told["first"]["phase"] == "loss"


def test_a_refusal_is_exit_code_2(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("--trainer.strategy=pipeline_parallel", "--ranks=4")
    assert command("gpt_zero3.yaml", *SMALL, *stages) == 2  # of two blocks
    assert "REFUSED" in capsys.readouterr().out


def test_local_sgd_is_compared_between_two_exchanges(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Local SGD was refused as a whole."""
    assert command("gpt_zero3.yaml", *SMALL, "--trainer.strategy=local_sgd") == 0
    assert "between two exchanges" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [("--trainer.strategy=ddp",), ("--ranks=0", "--steps=-1")])
def test_what_prove_cannot_take_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("gpt_zero3.yaml", *SMALL[:-1], *arguments) == 2
    error = capsys.readouterr().err
    assert "lightning-shard: ConfigError: prove got" in error
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft's use
def test_the_configurations_train_right(
    name: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(name, "--steps=1") == 0
    remarked = "differs from one device by design" in " ".join(capsys.readouterr().out.split())
    assert remarked == (name in DIFFER_BY_DESIGN)


def test_a_saved_configuration_of_fit_is_taken(command: Command, tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    text = (REPOSITORY / "configs" / "gpt_zero3.yaml").read_text()
    saved.write_text(f"{text}\nckpt_path: null\n")
    assert command(str(saved), *SMALL) == 0
