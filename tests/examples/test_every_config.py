"""Every file in configs/ is taken by the command's parser, and each class of strategy has one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_shard.core.schemes import SCHEMES
from tests.docs.test_yaml_blocks import ParsingCLI, made
from tests.examples.commands import REPOSITORY, run_command, set_arguments

FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
OF_A_SCRIPT = "gpt_demo.yaml"  # configures examples/train_gpt.py


def strategies_of(path: Path) -> Iterator[str]:
    """Find the class of the strategy that a config names."""
    strategy = yaml.safe_load(path.read_text())["trainer"]["strategy"]
    if isinstance(strategy, str):
        name = next(name for name in sorted(SCHEMES, key=len)[::-1] if strategy.startswith(name))
        yield SCHEMES[name].class_name
    else:
        yield strategy["class_path"].removeprefix("lightning_shard.")


def test_every_strategy_has_a_config() -> None:
    shown = {name for path in FILES for name in strategies_of(path)}
    assert shown == {scheme.class_name for scheme in SCHEMES.values()}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("path", [path for path in FILES if path.name != OF_A_SCRIPT], ids=str)
def test_the_parser_takes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    set_arguments(monkeypatch, "lightning-shard", "fit", f"--config={path}")
    strategy = ParsingCLI().config.fit.trainer.strategy
    if isinstance(strategy, str):
        assert strategy in SCHEMES
    else:
        made(strategy.class_path, strategy.as_dict().get("init_args", {}))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_its_first_lines_say_how_to_run_it(path: Path) -> None:
    what, *commands = [
        line for line in path.read_text().splitlines() if line.startswith("#") and line != "#"
    ]
    assert what.endswith(".") or "`" in what
    assert f"configs/{path.name}" in commands[0]


def runs_a_few_steps(path: Path, folder: Path) -> None:
    run = run_command(
        folder,
        "fit",
        f"--config=configs/{path.name}",
        "--trainer.max_steps=4",
        "--trainer.limit_val_batches=1",
    )
    assert run.returncode == 0, run.stderr
    assert "`Trainer.fit` stopped: `max_steps=4` reached" in run.stderr


# The others run in test_configs.py.
OF_THIS_FILE = [
    path
    for path in FILES
    if path.stem.removeprefix("gpt_")
    in (
        "shard_ddp",
        "compression",
        "zero1",
        "zero3_offload",
        "hybrid_sharding",
        "context_parallel",
        "local_sgd",
        "async_sgd",
        "elastic",
        "auto",
        "gan_zero2",
        "llama_tensor_pipeline",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("path", OF_THIS_FILE, ids=lambda path: path.stem)
def test_it_trains(path: Path, tmp_path: Path) -> None:
    runs_a_few_steps(path, tmp_path)


@pytest.mark.slow
def test_adapters_of_peft_train_under_zero3(tmp_path: Path) -> None:
    runs_a_few_steps(REPOSITORY / "configs" / "llama_lora_zero3.yaml", tmp_path)
