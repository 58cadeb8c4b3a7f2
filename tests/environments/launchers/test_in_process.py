"""Whole trainers on four ranks of one process, with Lightning's own DDP strategy underneath."""

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    RandomDataset,
    RandomIterableDataset,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_shard.backends.in_process.world import current_rank, current_world
from lightning_shard.environments.launchers.in_process import InProcessLauncher
from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    # Lightning's own, of what torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]


class ThreadedDDP(DDPStrategy):
    """Lightning's DDP, with ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(cluster_environment=InProcessEnvironment(num_ranks))
        self.num_ranks = num_ranks

    @override
    def _configure_launcher(self) -> None:
        self._launcher = InProcessLauncher(self.num_ranks)


def make_trainer(folder: Path, num_ranks: int = 4, **options: Any) -> pl.Trainer:
    options = {
        "max_epochs": 2,
        "limit_train_batches": 8,
        "limit_val_batches": 2,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "log_every_n_steps": 4,
    } | options
    return pl.Trainer(
        strategy=ThreadedDDP(num_ranks),
        accelerator="cpu",
        devices=num_ranks,
        default_root_dir=folder,
        **options,
    )


class Model(BoringModel):
    """Logs, prepares data, and keeps what each rank saw."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_rank = MeanMetric()
        self.prepared = 0
        self.weights_of_rank: dict[int, Tensor] = {}

    @override
    def prepare_data(self) -> None:
        self.prepared += 1

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean_rank(float(self.global_rank))
        self.log("rank", self.mean_rank, on_step=False, on_epoch=True)
        self.log("loss", output["loss"], sync_dist=True, on_step=False, on_epoch=True)
        return output

    @override
    def on_train_end(self) -> None:
        gathered = self.all_gather(self.layer.weight.detach())
        assert all(torch.equal(gathered[0], weight) for weight in gathered)
        assert current_rank() == self.global_rank == self.trainer.local_rank


def test_fit_with_checkpoints_and_a_progress_bar(tmp_path: Path) -> None:
    model = Model()
    before = model.layer.weight.detach().clone()
    trainer = make_trainer(
        tmp_path,
        callbacks=[ModelCheckpoint(dirpath=tmp_path / "checkpoints"), TQDMProgressBar()],
        enable_progress_bar=True,
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(model)
    assert trainer.global_step == 16
    assert not torch.equal(before, model.layer.weight)
    assert trainer.callback_metrics["rank"] == 1.5
    assert model.prepared == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch=1-step=16.ckpt"]
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").exists()
    assert current_world() is None
    assert not dist.is_initialized()
    loaded = Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    assert torch.equal(loaded.layer.weight, model.layer.weight)


def test_the_same_trainer_goes_on(tmp_path: Path) -> None:
    model = Model()
    trainer = make_trainer(tmp_path, enable_checkpointing=False)
    trainer.fit(model, datamodule=BoringDataModule())
    assert trainer.validate(model, verbose=False) == [{}]
    assert len(trainer.predict(model, DataLoader(RandomDataset(32, 8))) or []) == 2
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert trainer.current_epoch == 3


def test_weights_equal_from_run_to_run(tmp_path: Path) -> None:
    def train() -> Tensor:
        pl.seed_everything(1, verbose=False)
        model = Model()
        make_trainer(tmp_path, enable_checkpointing=False).fit(model)
        return model.layer.weight

    assert torch.equal(train(), train())


class KeepsGraph(Model):
    """Keeps a loss with its graph, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = [self.layer(torch.ones(32)).sum()]


def test_modules_that_keep_a_graph_are_copied(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 2, fast_dev_run=True)
    trainer.fit(KeepsGraph())
    assert trainer.global_step == 1


class LogsMetric(Model):
    """Calls a metric with the loss, as many templates do: its state carries the loss's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss = MeanMetric()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output: Any = super().training_step(batch, batch_idx)
        self.train_loss(output["loss"])
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        return output


def test_a_metric_of_the_loss_let_no_trainer_test_after_a_fit(tmp_path: Path) -> None:
    """The trainer's results held the loss with its graph, and only the model's own was detached."""
    model, trainer = LogsMetric(), make_trainer(tmp_path, 2, max_epochs=1, limit_train_batches=2)
    trainer.fit(model)
    assert trainer.test(model, verbose=False) == [{}]
    assert trainer.validate(model, verbose=False) == [{}]


class Slice:
    """Items of a generator, so many in each epoch; as loaders of time series are made."""

    def __init__(self, num_items: int) -> None:
        self.items = (torch.full((2, 32), 1.0 + number) for number in range(100))
        self.num_items = num_items

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.items, self.num_items)


class SeesBatches(Model):
    seen: ClassVar[list[tuple[int, float]]] = []

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.global_rank, float(batch[0, 0])))


@pytest.mark.parametrize("make", [lambda: Slice(2), lambda: Slice(2).items], ids=["held", "given"])
def test_a_loader_that_holds_a_generator_gives_every_rank_all_items(
    tmp_path: Path, make: Any
) -> None:
    """Python copies no generator; each rank is given all items, as of an iterator it copies."""
    SeesBatches.seen.clear()
    trainer = make_trainer(tmp_path, 2, max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"train_dataloaders(\.items)?, a generator, gives every"):
        trainer.fit(SeesBatches(), make())
    by_rank = [[value for one, value in SeesBatches.seen if one == rank] for rank in (0, 1)]
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][:2] == [1.0, 2.0]


class HoldsSocket(Model):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Sequential()
        with socket.socket() as one:
            self.held.sources = {"first": [one]}


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.held\.sources\['first'\]\[0\], a socket, cannot"
    ):
        make_trainer(tmp_path, 2, fast_dev_run=True).fit(HoldsSocket())


def test_what_a_loader_holds_is_named_by_its_place(tmp_path: Path) -> None:
    """Only attributes of the model, callbacks and data modules were looked through."""
    with socket.socket() as one:
        loader: Any = DataLoader(RandomIterableDataset(32, 4))
        loader.dataset.source = one
        with pytest.raises(ConfigError, match=r"train_dataloaders\.dataset\.source, a socket"):
            make_trainer(tmp_path, 2, fast_dev_run=True).fit(Model(), loader)


class HearsExceptions(pl.Callback):
    heard: list[tuple[int, str]]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: Any) -> None:
        self.heard.append((trainer.global_rank, type(exception).__name__))


class FailsOnRank(Model):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank_to_fail = rank

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and self.global_rank == self.rank_to_fail:
            raise ValueError("by the user")


@pytest.mark.parametrize("rank", [0, 2])
def test_callbacks_on_every_rank_hear_of_an_exception(tmp_path: Path, rank: int) -> None:
    heard: list[tuple[int, str]] = []
    callback = HearsExceptions()
    HearsExceptions.heard = heard
    trainer = make_trainer(tmp_path, 3, callbacks=[callback], enable_checkpointing=False)
    with pytest.raises(ValueError, match="by the user") as caught:
        trainer.fit(FailsOnRank(rank))
    assert f"This was raised on rank {rank} of 3." in caught.value.__notes__
    # Rank 0's trainer is the caller's, which hears what the caller sees.
    expected = {(r, "ValueError" if r in (0, rank) else RankFailedError.__name__) for r in range(3)}
    assert set(heard) == expected
    assert not dist.is_initialized()
    make_trainer(tmp_path, 3, fast_dev_run=True).fit(Model())


def test_datasets_are_shared_unless_iterable() -> None:
    def launch(value: Any) -> list[bool]:
        same: list[bool] = []

        class Job:
            def __init__(self) -> None:
                self.value = value

            def run(self, argument: Any) -> None:
                copied, original = _dataset_of(argument), _dataset_of(value)
                same.append(copied is original)

        InProcessLauncher(2).launch(Job().run, value)
        return same

    def _dataset_of(value: Any) -> Any:
        return value["train"][0].dataset

    mapped, iterable = RandomDataset(32, 4), RandomIterableDataset(32, 4)
    assert launch({"train": [DataLoader(mapped)]}) == [True, True]
    assert launch({"train": [DataLoader(iterable)]}) == [True, False]


def test_launch_without_a_trainer_returns_rank_0s_result() -> None:
    launcher = InProcessLauncher(3)
    assert launcher.is_interactive_compatible
    assert launcher.launch(current_rank) == 0


def test_launch_inside_a_world_is_refused() -> None:
    def fn(rank: int) -> None:
        InProcessLauncher(2).launch(current_rank)

    with pytest.raises(ConfigError, match="already"):
        run_ranks(fn, 2)
