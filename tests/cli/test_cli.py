"""The `lightning-shard` command, inside this process: its subcommands and its errors."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_shard
from lightning_shard.cli import main
from lightning_shard.cli.shard_cli import ShardCLI
from tests.examples.commands import QUIET, REPOSITORY, ignoring_advice, set_arguments
from tests.processes import run_alone

pytestmark = ignoring_advice()


class Command:
    """The command line of the digits config, on two ranks inside this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.outputs = [
            f"--trainer.default_root_dir={folder}",
            f"--trainer.logger.init_args.save_dir={folder}",
        ]

    def __call__(self, subcommand: str, *arguments: str) -> int:
        config = f"--config={REPOSITORY / 'configs' / 'digits_zero2.yaml'}"
        strategy = "--trainer.strategy=zero2_in_process"
        command = ("lightning-shard", subcommand, config, strategy)
        set_arguments(self.monkeypatch, *command, *self.outputs, *QUIET, *arguments)
        return main()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(REPOSITORY)
    return Command(monkeypatch, tmp_path)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each run logs in its own folder
def test_fit_saves_a_checkpoint_that_the_other_subcommands_load(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fit", "--trainer.max_epochs=2") == 0
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert command("validate", f"--ckpt_path={checkpoint}") == 0
    assert "val_accuracy" in capsys.readouterr().out
    assert command("test", f"--ckpt_path={checkpoint}") == 0
    assert "test_accuracy" in capsys.readouterr().out
    assert command("predict", f"--ckpt_path={checkpoint}") == 0


def test_the_config_of_a_run_is_saved_beside_its_log(command: Command, tmp_path: Path) -> None:
    assert command("fit", "--trainer.limit_train_batches=2", "--trainer.max_epochs=1") == 0
    (saved,) = tmp_path.rglob("config.yaml")
    assert "strategy: zero2_in_process" in saved.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("option", "message"),
    [("backend=smoke_signals", "smoke_signals"), ("num_ranks=3", "num_ranks=3")],
)
def test_a_strategy_that_refuses_its_options_is_one_line_and_exit_code_1(
    option: str, message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    by_class = "--trainer.strategy=lightning_shard.ZeRO2Strategy"
    assert command("fit", by_class, f"--trainer.strategy.init_args.{option}") == 1
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("lightning-shard: ")]
    assert line.startswith("lightning-shard: ConfigError: ")
    assert message in line
    assert "Traceback" not in error


def test_debug_shows_the_traceback(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    by_class = "--trainer.strategy=lightning_shard.ZeRO2Strategy"
    arguments = (by_class, "--trainer.strategy.init_args.num_ranks=3", "--debug")
    assert command("fit", *arguments) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "ConfigError: ZeRO2Strategy: num_ranks=3" in error


def test_an_error_while_it_runs_is_one_line_too(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "--trainer.callbacks=lightning_shard.profiling.HeldBytesTable"
    assert command("fit", "--trainer.strategy=auto", "--trainer.devices=1", table) == 1
    assert "lightning-shard: ConfigError: HeldBytesTable" in capsys.readouterr().err


def test_an_unknown_option_is_a_usage_error(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    by_class = "--trainer.strategy=lightning_shard.ZeRO2Strategy"
    with pytest.raises(SystemExit, match="2"):
        command("fit", by_class, "--trainer.strategy.init_args.bucket_gb=1")
    error = capsys.readouterr().err
    near = "'bucket_gb' is unknown; the nearest options of lightning_shard.ZeRO2Strategy: bucket_mb"
    assert near in error


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (["--trainer.max_epoks=1"], "'trainer.max_epoks' is unknown; the nearest options: trainer"),
        (["--modle=Mine"], "'modle' is unknown; the nearest options: model"),
        (["--model.init_args.learning_rte=1"], "DigitClassifier: learning_rate"),
        (["--model=examples.train_digits.DigitsClassifier"], "train_digits: DigitClassifier"),
        (["--data.init_args.batchsize=1"], "Digits: batch_size"),
        (
            [
                "--trainer.callbacks=lightning_shard.profiling.StepMonitor",
                "--trainer.callbacks.foldr=x",
            ],
            "StepMonitor: folder",
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_name(
    options: list[str], near: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command("fit", *options)
    assert near in capsys.readouterr().err


def test_an_unknown_strategy_is_told_with_the_nearest_names(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fit", "--trainer.strategy=zero3_inprocess") == 1
    error = capsys.readouterr().err
    assert "got strategy='zero3_inprocess'" in error
    assert "nearest are 'zero3_in_process', " in error


def test_classes_of_the_working_directory_are_found(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "from examples.train_digits import DigitClassifier\nclass Mine(DigitClassifier): ...\n"
    (tmp_path / "my_model_of_test_cli.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = "--model=my_model_of_test_cli.Mine"
    assert command("fit", model, "--trainer.fast_dev_run=true") == 0
    assert sys.path[0] == str(tmp_path)


LIGHT = """
import json
import sys
from lightning_shard.cli import main
sys.argv = ["lightning-shard", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print("status", end.code)
heavy = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "jsonargparse"}
print("imported", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["--help"], "lightning-shard fit --config", 0),
        (["--version"], f"lightning-shard {version('lightning-shard')}", 0),
        (["describe", "--help"], "usage: lightning-shard describe", 0),
        (["fit", "--help"], "--trainer.strategy NAME", 0),
        (["prove", "--config", "x", "-h"], "--narrow NARROW", 0),
        (["replay", "--help"], "Folder of the recorded step.", 0),
        (["consolidate", "a", "b", "--dtype", "int7"], "invalid choice: 'int7'", 2),
        ([], "lightning-shard: the following arguments are required: SUBCOMMAND", 2),
        (["fti"], "invalid choice: 'fti'", 2),
    ],
    ids=[
        "help",
        "version",
        "describe",
        "fit",
        "prove",
        "replay",
        "consolidate",
        "nothing",
        "misspelt",
    ],
)
def test_what_needs_neither_torch_nor_lightning_imports_neither(
    arguments: list[str], said: str, status: int
) -> None:
    """What needs neither torch nor lightning imported both."""
    finished = run_alone("-c", LIGHT, *arguments)
    assert finished.returncode == 0, finished.output
    assert said in finished.output
    assert f"status {status}\nimported []" in finished.output


def test_every_subcommand_is_in_the_short_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_arguments(monkeypatch, "lightning-shard", "--help")
    with pytest.raises(SystemExit, match="0"):
        main()
    listed = capsys.readouterr().out
    for subcommand in ShardCLI.subcommands():
        assert f"    {subcommand}" in listed


def test_the_long_help_has_every_option(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command("fit", "--help-all")
    assert "--trainer.reload_dataloaders_every_n_epochs" in capsys.readouterr().out


def test_the_package_lists_public_names_and_has_a_version() -> None:
    names = dir(lightning_shard)
    assert set(names) == {*lightning_shard.__all__, "__version__"}
    assert lightning_shard.__version__ == version("lightning-shard")


def test_plan_says_what_fits_and_writes_what_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = REPOSITORY / "configs" / "digits_zero2.yaml"
    written = tmp_path / "strategy.yaml"
    arguments = ("plan", f"--config={config}", "--devices=2", f"--yaml={written}", "--json")
    set_arguments(monkeypatch, "lightning-shard", *arguments)
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"]["fits"]
    assert "class_path: lightning_shard." in written.read_text(encoding="utf-8")
    set_arguments(monkeypatch, "lightning-shard", *arguments[:3], "--device-memory=1KiB")
    assert main() == 1
    assert "Nothing fits 1.0 KiB a device" in capsys.readouterr().out
