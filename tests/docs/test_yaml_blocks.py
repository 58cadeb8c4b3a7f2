"""Every block of YAML is taken by the command's own parser, and its strategy by its constructor."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_shard.cli.shard_cli import ShardCLI
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.docs.pages import NAMES, ROOT, blocks
from tests.examples.commands import set_arguments

SHOWN = [
    pytest.param(block.source, id=f"{name}:{block.line}")
    for name in NAMES
    for block in blocks(name, "yaml")
]
BASE = ROOT / "configs" / "gpt_zero3.yaml"


class ParsingCLI(ShardCLI):
    """Parses, and makes and runs nothing."""

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("source", SHOWN)
def test_the_parser_takes_it(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = yaml.safe_load(source)
    full = {**yaml.safe_load(BASE.read_text()), **shown}
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump(full))
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    set_arguments(monkeypatch, "lightning-shard", "fit", f"--config={path}")
    strategy = ParsingCLI().config.fit.trainer.strategy
    assert isinstance(made(strategy.class_path, strategy.init_args.as_dict()), DataParallelStrategy)


def made(class_path: str, options: dict[str, Any]) -> Any:
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)(**options)


def test_the_readme_shows_a_config_file() -> None:
    (shown,) = blocks("README.md", "yaml")
    assert yaml.safe_load(shown.source) == yaml.safe_load(BASE.read_text())
