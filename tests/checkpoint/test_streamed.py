"""A full checkpoint that is streamed is the file that it was, and nobody holds the whole of it."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.checkpoint.streamed import StreamedFile
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.strategies import checkpoint_files
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.trainer.hook_advice import explaining_weights_elsewhere
from tests.checkpoint.files.archives import same
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring("Checkpoint directory", "The '.*_dataloader' does not have many workers")
STEPS = 2


class Model(L.LightningModule):
    """Blocks, a tied weight, a number, a buffer and a weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4))
        )
        self.head = nn.Linear(16, 8, bias=False)
        self.tied = self.head
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.arange(3))

    @override
    def training_step(self, batch: Tensor, *_: Any) -> Tensor:
        return (self.head(self.blocks(self.first(batch))) * self.scale).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((one for one in self.parameters() if one.requires_grad), lr=0.01)

    @override
    def train_dataloader(self) -> Any:
        samples = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(samples, batch_size=4)


class Sees(Model):
    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            values = checkpoint["state_dict"].values()
            checkpoint["sum"] = float(sum(one.double().sum() for one in values))


def fit(strategy: str, folder: Path, model: Model, callbacks: Any = (), **options: Any) -> None:
    saver = ModelCheckpoint(folder, "last", every_n_train_steps=STEPS)
    cpu_trainer(
        strategy=f"{strategy}_in_process",
        devices=2,
        max_steps=STEPS,
        callbacks=[saver, *callbacks],
        **({"enable_checkpointing": True} | options),
    ).fit(model)


def saved(strategy: str, folder: Path, model: Model, **options: Any) -> dict[str, Any]:
    fit(strategy, folder, model, **options)
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    for name in ("callbacks", "loops"):  # they have paths and times
        del checkpoint[name]
    return checkpoint


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each streamed save of a model adds how many tensors it waited for."""
    seen = list[int]()
    records = StreamedFile.records

    def noted(file: StreamedFile, checkpoint: Any) -> Any:
        of_model = [place for place in file._awaited if place[0] != "kept"]
        if of_model:
            seen.append(len(of_model))
        return records(file, checkpoint)

    monkeypatch.setattr(StreamedFile, "records", noted)
    return seen


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "strategy",
    [
        "shard_ddp",
        "zero1",
        "zero2",
        "zero3",
        "tensor_parallel",
        "pipeline_parallel",
        "elastic",
        "async_sgd",
    ],
)
def test_a_streamed_file_is_the_one_that_was_written_whole(
    strategy: str,
    precision: Any,
    tmp_path: Path,
    streams: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = saved(strategy, tmp_path / "streamed", Model(), precision=precision)
    assert len(streams) == 1
    assert streams[0] > len(list(Model().parameters()))
    monkeypatch.setattr(DataParallelStrategy, "saves_shards", False)
    whole = saved(strategy, tmp_path / "whole", Model(), precision=precision)
    assert len(streams) == 1
    assert same(ours, whole)


def test_hooks_that_save_see_elements(tmp_path: Path, streams: list[int]) -> None:
    checkpoint = saved("zero3", tmp_path, Sees())
    assert not streams
    expected = sum(one.double().sum() for one in checkpoint["state_dict"].values())
    assert checkpoint["sum"] == pytest.approx(float(expected))


class SavesOnRank0(Callback):
    """Puts a hook on rank 0 only."""

    @override
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            trainer.callbacks.append(HasHook())  # type: ignore[attr-defined]


class HasHook(Callback):
    @override
    def on_save_checkpoint(self, *_: Any) -> None: ...


def test_a_hook_on_one_rank_is_one_for_all(tmp_path: Path, streams: list[int]) -> None:
    assert saved("zero3", tmp_path, Model(), callbacks=[SavesOnRank0()])["state_dict"]
    assert not streams


def test_a_tied_weight_is_one_record(tmp_path: Path, streams: list[int]) -> None:
    state = saved("zero3", tmp_path, Model())["state_dict"]
    assert streams
    addresses = {state[f"{name}.weight"].untyped_storage().data_ptr() for name in ("head", "tied")}
    assert len(addresses) == 1


class Looks(Callback):
    """Reads the weights that are being saved where it should not."""

    @override
    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        weights = trainer.strategy.lightning_module_state_dict()
        return {"norm": float(weights["first.weight"].norm())}

    @override
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.trainer = trainer


def test_who_reads_a_tensor_that_has_not_come_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"asks for elements of a weight .*without elements"):
        fit("zero3", tmp_path, Model(), callbacks=[Looks()])


def test_rank_0_is_not_told_to_read_weights_on_rank_0() -> None:
    """Rank 0 was told to read weights on rank 0."""
    with (
        pytest.raises(ConfigError, match=r"until then\. Work with them in on_save_checkpoint"),
        explaining_weights_elsewhere(0),
    ):
        float(torch.ones(2, device="meta").sum())


def test_a_disk_that_is_full_in_the_middle_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_files.write_archive

    def fails(file: Any, records: Any) -> None:
        def some() -> Any:
            for number, record in enumerate(records):
                if number == 30:
                    raise OSError(28, "No space left on device")
                yield record

        write(file, some())

    monkeypatch.setattr(checkpoint_files, "write_archive", fails)
    with pytest.raises(CheckpointError, match=r"last.ckpt was not saved: No space left on device"):
        fit("zero3", tmp_path, Model())
    assert not list(tmp_path.iterdir())


def test_without_elements_nothing_is_pickled_as_if_it_had_some() -> None:
    file = StreamedFile()
    checkpoint = {"weight": file.await_tensor(("parameter", 0), (2,), torch.float32)}
    with pytest.raises(CheckpointError, match="nobody has the elements"):
        list(file.records(checkpoint))
