"""`lightning-shard describe` and `consolidate`, inside this process."""

import json
import shutil
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from lightning_shard.cli import main
from lightning_shard.cli.parsers import num_bytes
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit
from tests.examples.commands import ignoring_advice, set_arguments

pytestmark = ignoring_advice()


class Watched(Model):
    """The model, with a metric that callbacks watch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the loss."""
        loss = super().training_step(batch, batch_idx)
        self.log("watched", loss)
        return loss


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By format, a checkpoint whose best score is known."""
    folder = tmp_path_factory.mktemp("described")
    for kind in ("full", "sharded"):
        writer = ModelCheckpoint(folder / kind, "one", monitor="watched", every_n_train_steps=2)
        torch.manual_seed(0)
        fit(
            LAYOUTS["hybrid-8"](checkpoint_format=kind),
            Watched(),
            callbacks=[writer],
            enable_checkpointing=True,
            max_steps=2,
        )
    return {kind: folder / kind / "one.ckpt" for kind in ("full", "sharded")}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    set_arguments(monkeypatch, "lightning-shard", *map(str, arguments))
    return main()


@pytest.mark.slow
def test_describe_tells_who_wrote_what(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(monkeypatch, "describe", saved["sharded"], "--verify") == 0
    said = capsys.readouterr().out
    for text in (
        "hybrid_parallel, 8 ranks, pp 2, dp 2, tp 2, axis_order ['pp', 'dp', 'tp'], cp 1, ep 1  ",
        f"torch {torch.__version__}",
        "epoch 0, global step 2",
        "611 float32; 2.4 kB",
        "group of 2 parameters, lr 0.005; group of 11 parameters",
        "exp_avg_sq",
        "monitor watched",
        "yes, as its checksums say",
        "weight [8, 4] 32 float32",
    ):
        assert text in said, said


@pytest.mark.slow
def test_describe_says_the_same_of_both_formats_to_scripts(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for kind, path in saved.items():
        assert run(monkeypatch, "describe", path, "--json") == 0
        told[kind] = json.loads(capsys.readouterr().out)
        assert told[kind]["format"] == kind
    assert told["sharded"]["mesh"]["tp"] == 2
    assert told["sharded"]["weights"]["tensors"] == told["full"]["weights"]["tensors"]
    for key in ("epoch", "global_step", "hyper_parameters"):
        assert told["sharded"][key] == told["full"][key]
    states = [one["optimizers"][0] for one in told.values()]
    assert states[0]["groups"] == states[1]["groups"]
    assert states[0]["keeps"] == states[1]["keeps"]
    (scores,) = told["full"]["metrics"]
    assert scores["callback"] == "ModelCheckpoint"
    assert scores["monitor"] == "watched"
    assert scores["best_model_score"] == scores["current_score"] > 0


def test_describe_ends_with_1_where_something_is_missing_or_damaged(
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "copy.ckpt"
    shutil.copytree(saved["sharded"], folder)
    shard = next(folder.glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert run(monkeypatch, "describe", folder, "--json") == 0
    capsys.readouterr()
    assert run(monkeypatch, "describe", folder, "--verify", "--json") == 1
    assert shard.name in json.loads(capsys.readouterr().out)["damaged"]
    shard.unlink()
    assert run(monkeypatch, "describe", folder) == 1
    assert f"{shard.name} is missing" in " ".join(capsys.readouterr().out.split())
    (folder / ".metadata").unlink()
    assert run(monkeypatch, "describe", folder) == 1
    assert "without .metadata" in capsys.readouterr().err


def test_describe_runs_no_code_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "touched",))

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {"w": torch.ones(3)}, "hyper_parameters": {"a": Evil()}}, path)
    assert run(monkeypatch, "describe", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["weights"]["elements"] == 3
    assert not (tmp_path / "touched").exists()


def test_consolidate_writes_and_says_what(
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.safetensors"
    options = ("--prefix", "blocks.", "--dtype", "bf16")
    assert run(monkeypatch, "consolidate", saved["sharded"], out, *options) == 0
    assert f"{out}: 8 tensors, 1.1 kB" in capsys.readouterr().out
    assert {tensor.dtype for tensor in load_file(out).values()} == {torch.bfloat16}
    assert run(monkeypatch, "consolidate", tmp_path / "nothing", out) == 1
    said = capsys.readouterr().err
    assert said.startswith("lightning-shard: CheckpointNotFoundError: There is no checkpoint")
    assert run(monkeypatch, "consolidate", tmp_path / "nothing", out, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("7b", 7)])
def test_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1MB", "0B", "five MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected 5GB"):
        num_bytes(text)
