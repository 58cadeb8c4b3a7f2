"""`bucket_mb="auto"` where no rank has started: in dry runs, in YAML; words that are refused."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.errors import ConfigError
from lightning_shard.fabric import ZeRO3Strategy as FabricZeRO3
from tests.examples.commands import set_arguments
from tests.strategies.parity import build, ignoring

pytestmark = ignoring()


class Model(L.LightningModule):
    """A model that the command line makes."""


def test_a_dry_run_takes_the_default() -> None:
    def dry(size: Any) -> str:
        strategy = lightning_shard.ZeRO3Strategy(bucket_mb=size)
        module = build("gpt")
        batch = next(iter(DataLoader(module.data(4), batch_size=4)))
        return repr(strategy.dry_run(module, batch, world_size=4))

    assert dry("auto") == dry(None)


def command_line(monkeypatch: pytest.MonkeyPatch, size: str, folder: Path) -> Any:
    config = folder / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy:\n"
        "    class_path: lightning_shard.ZeRO2Strategy\n    init_args:\n"
        f"      backend: in_process\n      bucket_mb: {size}\n"
    )
    set_arguments(monkeypatch, "program", f"--config={config}", "--seed_everything=0")
    made = LightningCLI(Model, run=False, save_config_callback=None)
    return made.trainer.strategy._options.bucket_mb


@pytest.mark.parametrize(("text", "size"), [("auto", "auto"), ("2", 2.0), ("null", None)])
def test_a_yaml_file_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, size: Any
) -> None:
    assert command_line(monkeypatch, text, tmp_path) == size


def test_a_yaml_file_with_another_word_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line(monkeypatch, "automatic", tmp_path)
    assert "'automatic'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        lightning_shard.ZeRO2Strategy,
        lightning_shard.LocalSGDStrategy,
        lightning_shard.ElasticStrategy,
        FabricZeRO3,
    ],
)
@pytest.mark.parametrize("size", ["", "Auto", "25", "25MB"])
def test_other_words_are_refused(kind: Any, size: str) -> None:
    words = r"must be a finite number of MB above 0 \(25 is usual\) or 'auto' or None, got "
    with pytest.raises(ConfigError, match=f"bucket_mb {words}{size!r}"):
        kind(bucket_mb=size)


@pytest.mark.parametrize("size", [0, -1.5])
def test_other_numbers_are_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=f"number of MB above 0.* got {size}"):
        lightning_shard.ZeRO3Strategy(bucket_mb=size)
