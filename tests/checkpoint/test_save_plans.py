"""Plans stand while nobody's layout changes; a rank that fails before its copy ends the save."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.backends.in_process.world import current_rank
from lightning_shard.checkpoint.background_saves import BoxSavePlanner, SavePlans, StagedItems
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_all
from lightning_shard.errors import CheckpointError
from tests.checkpoint.files.archives import same
from tests.checkpoint.sharded import runs
from tests.checkpoint.sharded.runs import NUM_STEPS, SAVED_AFTER, Model, fit
from tests.checkpoint.test_async_saves import Saving, sharded
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")
UNFROZEN_AFTER = 2


class Unfreezes(Model):
    """Its first bias has a state from the third step on, and its learning rate changes."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        if self.trainer.global_step == UNFROZEN_AFTER:
            self.embed.bias.requires_grad_(True)


def content(path: Path) -> Any:
    folder = StoredFolder(path)
    return {root: read_all(folder.nested(root)) for root in folder.roots}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each rank adds itself when it plans with the others."""
    ranks, real = [], SavePlans.make

    def make(self: SavePlans, *args: Any) -> Any:
        ranks.append(current_rank())
        return real(self, *args)

    monkeypatch.setattr(SavePlans, "make", make)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2-2", pytest.param("hybrid-8", marks=pytest.mark.slow)])
def test_ranks_plan_again_only_when_the_state_has_another_layout(
    layout: str, tmp_path: Path, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SAVED_AFTER", NUM_STEPS + 1)  # all in one epoch: its place is kept
    for name, is_async in (("async", True), ("sync", False)):
        torch.manual_seed(0)
        writer = ModelCheckpoint(
            tmp_path / name, "{step}", every_n_train_steps=1, save_top_k=-1,
            save_on_train_epoch_end=False,
        )  # fmt: skip
        strategy = sharded(layout, async_save=is_async)
        fit(strategy, Unfreezes(), callbacks=[writer], enable_checkpointing=True)
    num_ranks = int(layout.partition("-")[2])
    assert sorted(planned) == sorted([*range(num_ranks)] * 4)  # twice in each of both runs
    for step in range(1, NUM_STEPS + 1):
        ours, expected = (
            content(tmp_path / name / f"step={step}.ckpt") for name in ("async", "sync")
        )
        assert same(ours, expected)
    assert ours["optimizer_0"]["param_groups"][0]["lr"] != pytest.approx(1e-2)


def test_the_end_of_an_epoch_is_planned_once(tmp_path: Path, planned: list[int]) -> None:
    for name, is_async in (("async", True), ("sync", False)):
        torch.manual_seed(0)
        writer = ModelCheckpoint(
            tmp_path / name, "{step}", every_n_train_steps=1, save_top_k=-1,
            save_on_train_epoch_end=False,
        )  # fmt: skip
        fit(sharded("zero2-2", async_save=is_async), callbacks=[writer], enable_checkpointing=True)
    assert NUM_STEPS == 2 * SAVED_AFTER  # two epochs
    assert sorted(planned) == [0, 0, 0, 0, 1, 1, 1, 1]
    for step in range(1, NUM_STEPS + 1):
        ours, expected = (
            content(tmp_path / name / f"step={step}.ckpt") for name in ("async", "sync")
        )
        assert same(ours, expected)


def test_another_group_of_ranks_plans_again() -> None:
    planner: Any = BoxSavePlanner()
    planner.set_up_planner({"a": torch.ones(2)}, is_coordinator=True)
    local, plans = planner.create_local_plan(), SavePlans()
    plans.make(local, planner, None)
    assert plans.numbers_of(planner.create_local_plan(), None) == {1}
    plans.make(local, planner, None)  # since another rank has changed
    assert plans.numbers_of(planner.create_local_plan(), None) == {1, 2}
    another: Any = object()
    assert not plans.numbers_of(local, another)
    planner.set_up_planner({"a": torch.ones(2).half()}, is_coordinator=True)
    assert not plans.numbers_of(planner.create_local_plan(), None)


def on_rank_1(error: Exception, real: Any) -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        if current_rank() == 1:
            raise error
        return real(*args, **kwargs)

    return fails


def test_a_rank_that_cannot_tell_what_it_has_ends_the_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = on_rank_1(TypeError("nobody knows"), BoxSavePlanner.create_local_plan)
    monkeypatch.setattr(BoxSavePlanner, "create_local_plan", fails)
    with pytest.raises(CheckpointError, match=r"rank 1: TypeError\('nobody knows'\)"):
        fit(sharded("zero2-2"), callbacks=[Saving(tmp_path / "a.ckpt")])
    assert not os.listdir(tmp_path)


def test_a_rank_without_memory_for_its_copy_ends_the_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StagedItems.__init__
    monkeypatch.setattr(StagedItems, "__init__", on_rank_1(MemoryError("too much"), real))
    with pytest.raises((CheckpointError, MemoryError), match="too much"):
        fit(sharded("zero2-2"), callbacks=[Saving(tmp_path / "a.ckpt")])
    assert not os.listdir(tmp_path)
