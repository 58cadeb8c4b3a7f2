"""Saves in the background: what they hold, when they end, failures, top-k, exceptions."""

import errno
import os
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_shard import AsyncSGDStrategy, ElasticStrategy, LocalSGDStrategy, ZeRO2Strategy
from lightning_shard.backends.in_process.world import current_rank
from lightning_shard.checkpoint.background_saves import SaveInFlight, UnfinishedFolder
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.errors import CheckpointError, ConfigError
from tests.checkpoint.saved_sections import is_sharded_folder
from tests.checkpoint.sharded.runs import LAYOUTS, NUM_STEPS, SAVED_AFTER, Model, fit
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice(
    "Be aware that when using `ckpt_path`",
    "The dirpath has changed",
    "You're resuming from a checkpoint that ended before",
    ".*was called without a model",
    ".*there is no last checkpoint available",
)
RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}


def sharded(layout: str, *, async_save: bool = True) -> Any:
    return LAYOUTS[layout](checkpoint_format="sharded", async_save=async_save)


def made(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


class Saving(L.Callback):
    """Saves after a step, and notes which folders are complete at the beginning of each."""

    def __init__(self, path: Path, after: int = SAVED_AFTER) -> None:
        self.path = path
        self.after = after
        self.complete: list[bool] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Note what is there."""
        if trainer.is_global_zero:
            self.complete.append(is_sharded_folder(self.path))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save, once."""
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)


class Gate:
    """What holds writers back until a step has been taken; the same for all ranks."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __deepcopy__(self, memo: Any) -> "Gate":
        return self


class Opening(L.Callback):
    """Opens a gate once a step has been taken, and notes what there is before."""

    def __init__(self, gate: Gate, after: int, folder: Path | None = None) -> None:
        self.gate, self.after, self.folder = gate, after, folder
        self.before: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Open it."""
        if trainer.global_step == self.after:
            if self.folder is not None and trainer.is_global_zero:
                self.before = names_in(self.folder)
            self.gate.is_open.set()


def names_in(folder: Path) -> list[str]:
    """Return the names of what is no hidden leftover."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Hold writers back until the gate opens."""
    gate = Gate()
    real = UnfinishedFolder.write_boxes

    def write_boxes(self: UnfinishedFolder) -> Any:
        assert gate.is_open.wait(60)
        return real(self)

    monkeypatch.setattr(UnfinishedFolder, "write_boxes", write_boxes)
    yield gate
    gate.is_open.set()


def wait_for(ranks: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = SaveInFlight.progress

    def progress(self: SaveInFlight) -> int:
        if self._rank in ranks:
            wait(self._jobs)
        found: int = real.fget(self)
        return found

    monkeypatch.setattr(SaveInFlight, "progress", property(progress))


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every thread have finished when ranks ask."""
    wait_for(range(8), monkeypatch)


@pytest.mark.parametrize(
    "layout", ["zero3-4", "pipeline-2", pytest.param("hybrid-8", marks=pytest.mark.slow)]
)
def test_a_save_is_of_its_moment_though_training_has_gone_on(
    layout: str, tmp_path: Path, gate: Gate
) -> None:
    whole = made(dropout=0.3)
    saving = Saving(tmp_path / "a.ckpt")
    fit(sharded(layout), whole, callbacks=[saving, Opening(gate, NUM_STEPS)])
    assert not any(saving.complete)  # nothing was there while writers were held back
    torch.manual_seed(99)
    again = fit(sharded(layout), made(dropout=0.3), ckpt_path=tmp_path / "a.ckpt")
    assert again.losses == whole.losses[SAVED_AFTER:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.usefixtures("prompt")
def test_a_save_is_complete_while_training_goes_on(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "a.ckpt", after=1)
    fit(sharded("zero2-2"), made(), callbacks=[saving])
    assert saving.complete[0] is saving.complete[1] is False
    assert saving.complete[3]
    assert os.listdir(tmp_path) == ["a.ckpt"]


def failing_on(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = UnfinishedFolder.write_boxes

    def write_boxes(self: UnfinishedFolder) -> Any:
        if self._rank == rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self)

    monkeypatch.setattr(UnfinishedFolder, "write_boxes", write_boxes)


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize(("after", "num_steps"), [(2, 2), (NUM_STEPS, NUM_STEPS)])
def test_a_full_disk_of_one_rank_is_told_at_the_next_step_or_at_the_end(
    after: int, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    fit(sharded("zero2-2"), made(), callbacks=[Saving(path, after=1)])
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    failing_on(1, monkeypatch)
    model = made()
    with pytest.raises(CheckpointError, match=r"rank 1: .*No space left on device \(ENOSPC\)"):
        fit(sharded("zero2-2"), model, callbacks=[Saving(path, after=after)])
    assert len(model.losses) == num_steps
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_failure_does_not_wait_for_the_other_ranks_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    failing_on(0, monkeypatch)
    wait_for([0], monkeypatch)
    real = SaveInFlight.advance
    cancelled = []

    def advance(self: SaveInFlight, *, has_failed: bool) -> bool:
        cancelled.append(has_failed)
        gate.is_open.set()
        return real(self, has_failed=has_failed)

    monkeypatch.setattr(SaveInFlight, "advance", advance)
    with pytest.raises(CheckpointError, match=r"rank 0: .*ENOSPC"):
        fit(sharded("zero2-2"), made(), callbacks=[Saving(tmp_path / "a.ckpt")])
    assert cancelled == [True, True]


def test_the_last_checkpoint_stays_until_the_next_is_complete(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    writer = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)

    class Closing(Opening):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.strategy.finish_save()
                self.gate.is_open.clear()

    opening = Closing(gate, NUM_STEPS, tmp_path)
    fit(sharded("zero2-2"), made(), callbacks=[opening, writer], enable_checkpointing=True)
    assert opening.before == ["step=2.ckpt"]
    assert os.listdir(tmp_path) == ["step=4.ckpt"]


def test_the_best_and_the_last(tmp_path: Path) -> None:
    writer = ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=1,
    )  # fmt: skip
    fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    for name in os.listdir(tmp_path):
        again = fit(sharded("zero2-2"), made(), ckpt_path=tmp_path / name, max_steps=5)
        assert len(again.losses) == (2 if name == "step=3.ckpt" else 1)


def test_a_thread_of_saves_removes_what_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread asked which rank it was and removed nothing."""

    def rank_of_caller() -> int | None:
        is_writer = threading.current_thread().name.startswith("async-save")
        return 1 if is_writer else current_rank()

    monkeypatch.setattr(
        "lightning_shard.environments.started_elsewhere.current_rank", rank_of_caller
    )
    writer = ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1
    )
    fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert os.listdir(tmp_path) == ["step=4.ckpt"]


class Raising(L.Callback):
    """Raises after a save has begun, before ranks ask how far it is; on all ranks or on one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Raise."""
        if trainer.global_step == SAVED_AFTER and trainer.global_rank in self.ranks:
            raise KeyError("lost")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("ranks", [(0, 1), (1,), (0,)])
def test_an_exception_while_a_save_is_in_flight(ranks: tuple[int, ...], tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1),
        OnExceptionCheckpoint(tmp_path, "error"),
        Raising(ranks),
    ]
    with pytest.raises(KeyError) as caught:
        fit(sharded("zero2-2"), made(), callbacks=callbacks, enable_checkpointing=True)
    left = sorted(os.listdir(tmp_path))
    if len(ranks) == 2:
        assert left == ["error.ckpt", "step=2.ckpt"]
    else:
        assert left == ["step=1.ckpt"]
        assert any("step=2.ckpt was still being" in note for note in caught.value.__notes__)
    fit(sharded("zero2-2"), made(), ckpt_path=tmp_path / left[-1])


def test_host_memory_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = []
    real = HostBuffers.lend

    def lend(self: HostBuffers, num_bytes: int) -> Any:
        buffer = real(self, num_bytes)
        lent.append((id(self), buffer.data_ptr()))
        return buffer

    monkeypatch.setattr(HostBuffers, "lend", lend)
    writer = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(sharded("zero2-2"), made(), callbacks=[writer], enable_checkpointing=True)
    assert len(lent) == 2 * NUM_STEPS
    assert len(set(lent)) == 2


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "strategy",
    [
        lambda **o: LocalSGDStrategy(**RANKS, sync_every=2, **o),
        lambda **o: AsyncSGDStrategy(**RANKS, staleness_bound=1, **o),
        lambda **o: ElasticStrategy(**RANKS, scheme="zero2", **o),
        lambda **o: LAYOUTS["shard_ddp-2"](compression="topk", **o),
    ],
    ids=["local_sgd", "async_sgd", "elastic", "topk"],
)
def test_schemes_with_state_of_their_own(strategy: Any, tmp_path: Path, gate: Gate) -> None:
    folder = tmp_path / "sharded"
    options: Any = {"checkpoint_format": "sharded"}
    opening = Opening(gate, NUM_STEPS)
    background = Saving(folder / "a.ckpt")
    fit(strategy(async_save=True, **options), made(), callbacks=[background, opening])
    fit(strategy(**options), made(), callbacks=[Saving(folder / "b.ckpt")])
    again = fit(strategy(**options), made(), ckpt_path=folder / "a.ckpt")
    expected = fit(strategy(**options), made(), ckpt_path=folder / "b.ckpt")
    torch.testing.assert_close(again.losses, expected.losses, rtol=1e-6, atol=0)


def test_the_full_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="Set checkpoint_format='sharded'"):
        ZeRO2Strategy(async_save=True)
