"""A run saves, resumes and is looked at behind fsspec as on a disk: each scheme, each format."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import AsyncSGDStrategy, DDPStrategy, ElasticStrategy, LocalSGDStrategy
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from lightning_shard.checkpoint.conversion.source import describe
from lightning_shard.checkpoint.files.parts import is_leftover
from lightning_shard.errors import CheckpointError
from tests.checkpoint.sharded.runs import LAYOUTS, NUM_STEPS, Model, fit, quiet_trainer
from tests.checkpoint.sharded.test_matrix import single_device
from tests.checkpoint.shared_store import open_store
from tests.examples.commands import ignoring_advice
from tests.processes import run_processes
from tests.strategies import parity

pytestmark = ignoring_advice(
    "Be aware that when using `ckpt_path`",
    ".*there is no last checkpoint available",
    "Checkpoint directory .* exists and is not empty",
)
RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}
STYLES: dict[str, Callable[..., Any]] = {
    **LAYOUTS,
    "topk": lambda **o: DDPStrategy(**RANKS, compression="topk", **o),
    "local_sgd": lambda **o: LocalSGDStrategy(**RANKS, sync_every=2, **o),
    "async_sgd": lambda **o: AsyncSGDStrategy(**RANKS, **o),
    "elastic": lambda **o: ElasticStrategy(**RANKS, scheme="zero2", snapshot_every=1, **o),
}
HOW: dict[str, dict[str, Any]] = {
    "full": {"checkpoint_format": "full"},
    "sharded": {"checkpoint_format": "sharded"},
    "async": {"checkpoint_format": "sharded", "async_save": True},
}


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    if filesystem.exists("/run"):
        filesystem.rm("/run", recursive=True)


def saver(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max",
        save_last=True,
    )  # fmt: skip


def train(strategy: Any, folder: str, num_steps: int, **options: Any) -> tuple[Any, Model]:
    """Train, on from the last checkpoint if there is one; return the trainer and the model."""
    torch.manual_seed(0)
    model = Model()
    options = {"callbacks": [saver(folder)], "enable_checkpointing": True} | options
    trainer = quiet_trainer(strategy, max_steps=num_steps, **options)
    trainer.fit(model, ckpt_path="last")
    return trainer, model


def names(filesystem: Any, folder: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in filesystem.ls(folder, detail=False))


QUICK = [("shard_ddp-2", "full"), ("zero3-4", "async")]
ALL = [(style, how) for style in STYLES for how in HOW]
SLOW = [one for one in ALL if one not in QUICK and one != ("elastic", "async")]


def check_style(style: str, kind: str, memory: Any) -> None:
    how, folder = HOW[kind], "memory://run/checkpoints"
    train(STYLES[style](**how), folder, 2)
    before = names(memory, "/run/checkpoints")
    assert before == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    memory.makedirs("/run/checkpoints/last-v7.ckpt")  # of a save that was killed
    memory.pipe("/run/checkpoints/last-v7.ckpt/__0_0.00000000.distcp", b"half")
    trainer, model = train(STYLES[style](**how), folder, NUM_STEPS)
    assert trainer.ckpt_path == f"{folder}/last.ckpt"
    assert len(model.losses) == 2
    if style in LAYOUTS:
        torch.testing.assert_close(model.losses, single_device().losses[2:], rtol=1e-5, atol=0)
    left = names(memory, "/run/checkpoints")
    assert left == ["last-v7.ckpt", "last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert not any(map(is_leftover, left))
    whole = Model.load_from_checkpoint(f"{folder}/last.ckpt")
    told = describe(f"{folder}/last.ckpt", check=True)
    assert (told["missing"], told["damaged"], told["verified"]) == ([], None, True)
    consolidate(f"{folder}/last.ckpt", f"{folder}/whole.pt")
    stored = torch.load(memory.open("/run/checkpoints/whole.pt", "rb"), weights_only=True)
    torch.testing.assert_close(dict(stored), dict(whole.state_dict()), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("style", "kind"), QUICK)
def test_a_url_is_no_local_folder(style: str, kind: str, memory: Any) -> None:
    """A URL was a local folder."""
    check_style(style, kind, memory)
    assert not Path("memory:").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("style", "kind"), SLOW)
def test_each_style_behind_fsspec(style: str, kind: str, memory: Any) -> None:
    check_style(style, kind, memory)


def test_a_folder_that_never_came_to_its_end_is_no_checkpoint(memory: Any) -> None:
    memory.pipe("/run/a.ckpt/__0_0.00000000.distcp", b"half")
    for load in (
        lambda: Model.load_from_checkpoint("memory://run/a.ckpt"),
        lambda: fit(LAYOUTS["zero2-2"](), ckpt_path="memory://run/a.ckpt"),
    ):
        with pytest.raises(CheckpointError, match=r"is a folder without \.metadata"):
            load()


def test_damage_of_a_remote_folder_is_found_before_anything_is_loaded(memory: Any) -> None:
    train(LAYOUTS["zero2-2"](**HOW["sharded"]), "memory://run/a", 2, callbacks=[
        ModelCheckpoint("memory://run/a", "x", every_n_train_steps=2)])  # fmt: skip
    (file,) = [one for one in memory.find("/run/a/x.ckpt") if "__1_0" in one]
    content = bytearray(memory.cat_file(file))
    content[len(content) // 2] ^= 1
    memory.pipe_file(file, bytes(content))
    for num_ranks in ("zero2-2", "zero3-3"):
        with pytest.raises(CheckpointError, match=r"__1_0\.[0-9a-f]+\.distcp is damaged"):
            fit(LAYOUTS[num_ranks](), ckpt_path="memory://run/a/x.ckpt")


def test_a_root_of_a_run_behind_fsspec(memory: Any) -> None:
    trainer = quiet_trainer(
        LAYOUTS["zero2-2"](**HOW["sharded"]),
        default_root_dir="memory://run",
        enable_checkpointing=True,
    )
    torch.manual_seed(0)
    model = Model()
    trainer.fit(model)
    (path,) = memory.ls("/run/checkpoints", detail=False)
    assert trainer.checkpoint_callback.best_model_path == f"memory:/{path}"
    trainer.save_checkpoint("memory://run/after.ckpt")
    again = fit(LAYOUTS["zero1-3"](), ckpt_path="memory://run/after.ckpt", max_steps=6)
    assert len(again.losses) == 2


def in_a_process(folder: str, how: dict[str, Any]) -> Any:
    """As a rank of two: train, go on from what all have saved, return losses and what is there."""
    import warnings

    parity.ignore_upstream_warnings()
    for message in ("Be aware that when using", "Checkpoint directory", ".*no last checkpoint"):
        warnings.filterwarnings("ignore", message)
    open_store(folder)
    losses = []
    for num_steps in (2, NUM_STEPS):
        strategy = LAYOUTS["zero2-2"](backend="gloo", **how)
        _, model = train(strategy, "shared://run", num_steps, devices=2)
        losses += model.losses
    return losses, names(fsspec.filesystem("shared"), "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", HOW)
def test_processes_save_and_go_on_behind_fsspec(kind: str, tmp_path: Path) -> None:
    told = run_processes(in_a_process, 2, timeout_seconds=250, folder=str(tmp_path), how=HOW[kind])
    for losses, there in told:
        torch.testing.assert_close(losses, single_device().losses, rtol=1e-5, atol=0)
        assert there == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == there
