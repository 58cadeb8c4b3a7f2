"""What the README shows is what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_shard
from lightning_shard import RankFailedError, ZeRO2Strategy
from lightning_shard.profiling import CompressionRatio
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.registry import SCHEMES
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy
from tests.strategies.parity import UPSTREAM_WARNINGS, quiet_trainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_yaml_is_the_config_file() -> None:
    shown = yaml.safe_load(blocks("yaml")[0])
    assert shown == yaml.safe_load((ROOT / "configs/gpt_zero3.yaml").read_text())


def test_the_example_of_several_ranks_runs() -> None:
    (source,) = [block for block in blocks("python") if "run_ranks" in block]
    names: dict[str, Any] = {}
    with pytest.raises(RankFailedError):
        exec(compile(source, "README.md", "exec"), names)
    assert names["mean_of_ranks"] is not None


@pytest.mark.filterwarnings(*(f"ignore:{message}" for message in UPSTREAM_WARNINGS))
def test_the_codec_of_ones_own_trains() -> None:
    (source,) = [block for block in blocks("python") if "(Codec)" in block]
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    strategy = ZeRO2Strategy(backend="in_process", compression=names["Sign"]())
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_steps=4, callbacks=[CompressionRatio()]
    )
    trainer.fit(model)
    assert trainer.callback_metrics["compression"] > 1
    assert not torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("name", [n for n in lightning_shard.__all__ if n.endswith("Error")])
def test_every_error_is_explained(name: str) -> None:
    assert f"`{name}`" in README or name == "ShardError"


def test_every_scheme_and_option_is_listed() -> None:
    for scheme in SCHEMES:
        assert f"`{scheme}`" in README
    lightnings = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}
    lightnings |= {"precision_plugin", "return"}
    for strategy in (DataParallelStrategy, TensorParallelStrategy):
        for option in strategy.__init__.__annotations__.keys() - lightnings:
            assert re.search(rf"\| `{option}[`=]", README), option


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http|#)([^)]+)\)", README))
def test_every_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()
