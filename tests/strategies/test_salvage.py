"""A run raises: the caller gets that very error, and what is full is saved before."""

import copy
import io
import logging
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

import lightning_shard
from lightning_shard.errors import RankFailedError
from tests.trainers import cpu_trainer

pytestmark = [pytest.mark.filterwarnings("ignore")]

STRATEGIES = ["shard_ddp", "zero1", "zero2", "zero3", "local_sgd", "elastic"]
SPLITTING = ["tensor_parallel", "pipeline_parallel"]
ALL = frozenset({0, 1})


class WithDetailsError(Exception):
    """An exception of a user's that cannot be made anew from its message."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code


def mine() -> BaseException:
    return ValueError("mine")


class Raises(BoringModel):
    """Raises in a hook, on some ranks."""

    def __init__(
        self,
        make: Callable[[], BaseException] | None,
        ranks: frozenset[int] = ALL,
        hook: str = "training_step",
    ) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 2)
        )
        self.make, self.ranks, self.hook = make, ranks, hook

    def raise_in(self, hook: str, batch_idx: int = 2) -> None:
        here = self.hook == hook and self.trainer.strategy.mesh_rank in self.ranks
        if here and batch_idx == 2 and self.make is not None:
            raise self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.raise_in("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.raise_in("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.raise_in("on_before_optimizer_step", self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        self.raise_in("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        self.raise_in("configure_optimizers")
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SavesItself(pl.Callback):
    """A user's own callback; notes what it hears of."""

    heard: list[tuple[int, BaseException]]

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.heard.append((trainer.strategy.mesh_rank, exception))
        trainer.save_checkpoint(self.file)


def make_trainer(strategy: Any, folder: Path, **options: Any) -> pl.Trainer:
    SavesItself.heard = []
    callbacks = [
        OnExceptionCheckpoint(folder, "on_exception"),
        ModelCheckpoint(folder, filename="saver", save_on_exception=True),
        SavesItself(folder / "own.ckpt"),
    ]
    name = f"{strategy}_in_process" if isinstance(strategy, str) else strategy
    defaults: dict[str, Any] = {
        "strategy": name,
        "devices": 2,
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        "default_root_dir": folder,
    }
    return cpu_trainer(callbacks=callbacks, **{**defaults, **options})


def steps_saved(folder: Path) -> dict[str, int]:
    return {
        file.stem: torch.load(file, weights_only=False)["global_step"]
        for file in folder.glob("*.ckpt")
    }


def reference(steps: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Raises(None)
    trainer = make_trainer("shard_ddp", folder, max_steps=steps, limit_val_batches=0)
    trainer.fit(model)
    return {"model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def assert_same(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(dict(saved["state_dict"]), dict(expected["model"]))
    state = saved["optimizer_states"][0]["state"]
    torch.testing.assert_close(state, expected["optimizer"]["state"])


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *SPLITTING])
def test_the_users_error_stays_and_what_is_full_is_saved(strategy: str, tmp_path: Path) -> None:
    """The user's error became ours and nothing was saved."""
    torch.manual_seed(1)
    model = Raises(lambda: WithDetailsError(3, why="mine"))
    trainer = make_trainer(strategy, tmp_path)
    with pytest.raises(WithDetailsError, match=r"mine \(3\)") as caught:
        trainer.fit(model)
    assert caught.value.code == 3
    assert trainer.interrupted
    assert steps_saved(tmp_path) == {"on_exception": 2, "saver": 2, "own": 2}
    assert sorted(rank for rank, _ in SavesItself.heard) == [0, 1]
    saved = torch.load(tmp_path / "own.ckpt", weights_only=False)
    if strategy not in {"local_sgd", *SPLITTING}:  # which train on other batches
        assert_same(saved, reference(2, tmp_path / "reference"))
    model.make = None  # the caller's model is full, and trains again
    make_trainer(strategy, tmp_path / "again").fit(model)


@pytest.mark.parametrize("hook", ["validation_step", "on_train_epoch_end", "configure_optimizers"])
def test_an_error_of_another_hook_is_the_users_as_well(hook: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        make_trainer("zero3", tmp_path).fit(Raises(mine, hook=hook))
    assert steps_saved(tmp_path)["own"] == (0 if hook == "configure_optimizers" else 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_saves_what_each_has_where_one_rank_fails(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="mine"):
        make_trainer("shard_ddp", tmp_path).fit(Raises(mine, frozenset({rank})))
    assert steps_saved(tmp_path) == {"on_exception": 2, "saver": 2, "own": 2}
    saved = torch.load(tmp_path / "own.ckpt", weights_only=False)
    assert_same(saved, reference(2, tmp_path / "reference"))


@pytest.mark.parametrize("hook", ["training_step", "on_before_optimizer_step"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_parts_of_a_state_are_never_saved_and_it_is_said_why(
    strategy: str, hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="mine") as caught:
        make_trainer(strategy, tmp_path).fit(Raises(mine, frozenset({1}), hook))
    assert steps_saved(tmp_path) == {}
    assert "nothing is saved on this exception" in caplog.text
    assert any("nothing is saved" in note for note in caught.value.__notes__)
    errors = {rank: type(error) for rank, error in SavesItself.heard}
    assert errors[0] is ValueError  # the caller's callbacks hear what the caller gets
    assert errors[1] in (ValueError, RankFailedError)


@pytest.mark.parametrize("ranks", [ALL, frozenset({1})])
def test_ctrl_c_and_exits_of_another_rank_arrive_as_themselves(
    ranks: frozenset[int], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    trainer = make_trainer("shard_ddp", tmp_path)
    with pytest.raises(SystemExit) as caught:  # Lightning's end after Ctrl-C
        trainer.fit(Raises(KeyboardInterrupt, ranks))
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert {type(error) for rank, error in SavesItself.heard if rank == 0} == {KeyboardInterrupt}
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(SystemExit) as caught:
        make_trainer("zero2", tmp_path).fit(Raises(lambda: SystemExit(7), ranks))
    assert caught.value.code == 7


class SendsSigterm(Raises):
    """Is sent SIGTERM, as its process, while one rank runs."""

    def raise_in(self, hook: str, batch_idx: int = 2) -> None:
        if self.hook == hook and self.trainer.strategy.mesh_rank in self.ranks and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "async_sgd"])
@pytest.mark.parametrize(("hook", "steps"), [("training_step", 3), ("validation_step", 4)])
def test_sigterm_to_a_process_ends_its_run(
    strategy: str, hook: str, steps: int, tmp_path: Path
) -> None:
    """SIGTERM to a process was a deadlock."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(strategy, tmp_path, limit_val_batches=3)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(SendsSigterm(None, frozenset({1}), hook))
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert trainer.interrupted
    assert trainer.received_sigterm
    if strategy == "elastic":  # at its next boundary; here it has come to the end
        steps = 4
    ahead = strategy.endswith("sgd")  # the other rank may have begun a step more
    assert steps_saved(tmp_path)["own"] in {steps, min(steps + ahead, 4)}


def test_elastic_ranks_leave_all_at_once_and_save_on_sigterm(tmp_path: Path) -> None:
    strategy = lightning_shard.ElasticStrategy(backend="in_process", num_ranks=2, snapshot_every=1)
    trainer = make_trainer(strategy, tmp_path, devices=1)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(SendsSigterm(None, frozenset({1})))
    assert caught.value.code == 128 + signal.SIGTERM
    saved = steps_saved(tmp_path)
    assert saved == dict.fromkeys(["last-elastic-step=3", "on_exception", "saver", "own"], 3)


@pytest.mark.parametrize(
    "strategy", ["shard_ddp", "zero3", "tensor_parallel", "pipeline_parallel", "elastic"]
)
def test_a_trainer_is_saved_after_a_fit(strategy: str, tmp_path: Path) -> None:
    """A trainer could not be saved after a fit."""
    trainer = make_trainer(strategy, tmp_path, fast_dev_run=True)
    model = Raises(None)
    trainer.fit(model)
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.global_step == 1
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(trainer).lightning_module):
        torch.testing.assert_close(copied.state_dict(), model.state_dict())
