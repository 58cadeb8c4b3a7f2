"""Elastic launches: the caller gets a survivor's results, if its own thread does not survive."""

from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.backends.in_process.world import ElasticWorld, current_world
from lightning_shard.elastic.membership.generation import GroupSetup
from lightning_shard.elastic.membership.membership_table import Bounds
from lightning_shard.elastic.membership.ranks import InProcessMembership
from lightning_shard.environments.launchers.in_process import InProcessLauncher
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.testing import Fault, injected_faults
from tests.trainers import cpu_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
]


def world() -> ElasticWorld:
    running = current_world()
    assert isinstance(running, ElasticWorld)
    return running


def count(model: nn.Linear, num_steps: int = 6) -> list[int]:
    """Count up the bias in steps that all survivors take; return the threads of each step."""
    membership = InProcessMembership(Bounds())
    generation = membership.begin() or membership.following()
    while True:
        membership.init_groups(
            generation,
            GroupSetup(InProcessBackend(), torch.device("cpu"), timedelta(seconds=10)),
        )
        try:
            dist.broadcast(model.bias.data, 0)
            while (step := int(model.bias)) < num_steps:
                membership.begin_step(step)
                dist.barrier()
                model.bias.data += 1
                if dist.get_rank() == 0:
                    model.weight.data.fill_(world().thread)
                flags = torch.tensor([membership.is_wanted, membership.is_leaving]).int()
                dist.all_reduce(flags, dist.ReduceOp.MAX)
                if membership.is_leaving:
                    membership.leave()
                    raise SystemExit(143)
                if flags.any():
                    break
            else:
                membership.leave()
                return [int(member.removeprefix("thread")) for member in generation.members]
        except RankFailedError:
            pass
        membership.drop_groups()
        generation = membership.following()


def launch(*faults: Fault, num_ranks: int = 3) -> tuple[nn.Linear, list[int]]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.bias)
    with injected_faults(faults) as struck:
        result = InProcessLauncher(num_ranks, is_elastic=True).launch(count, model)
    assert sorted(struck, key=str) == sorted(faults, key=str)
    assert current_world() is None
    assert model.bias.item() == 6.0
    return model, result


def test_without_faults() -> None:
    model, result = launch()
    assert result == [0, 1, 2]
    assert model.weight.item() == 0.0


@pytest.mark.parametrize("kind", ["drop", "leave"])
def test_the_callers_thread_goes(kind: Any) -> None:
    model, result = launch(Fault(0, 1, kind, at_step=3))
    assert result == [1, 2]
    assert model.weight.item() == 1.0


def test_all_of_the_first_ranks_go() -> None:
    faults = [Fault(rank, 1, "drop", at_step=rank + 2) for rank in range(3)]
    model, result = launch(*faults, Fault(3, 1, "add", at_step=2))
    assert result == [3]
    assert model.weight.item() == 3.0


def test_another_one_goes_and_the_callers_model_is_its_own() -> None:
    model, result = launch(Fault(1, 1, "drop", at_step=3))
    assert result == [0, 2]
    assert model.weight.item() == 0.0


def test_all_are_dropped() -> None:
    faults = [Fault(rank, 1, "drop", at_step=2) for rank in range(3)]
    with pytest.raises(RankFailedError, match="All 3 ranks were dropped"):
        launch(*faults)


def test_all_fail_and_the_caller_sees_the_first_error() -> None:
    def fail() -> None:
        raise KeyError(f"thread {world().thread}")

    with pytest.raises(KeyError, match="thread 0"):
        InProcessLauncher(3, is_elastic=True).launch(fail)


def test_a_failure_that_others_survive_is_a_warning() -> None:
    def work() -> int:
        thread = world().thread
        world().reconfigure(1, [0, 1, 2])
        if thread == 0:
            raise ValueError("of the caller's thread")
        return thread

    with pytest.warns(UserWarning, match="Thread 0 .* failed, .* ValueError: of the caller's"):
        assert InProcessLauncher(3, is_elastic=True).launch(work) == 1


def test_faults_of_an_ordinary_launch() -> None:
    def work() -> None:
        InProcessBackend().init_process_group(
            rank=current_world().rank,  # type: ignore[union-attr]
            world_size=2,
            device=torch.device("cpu"),
            timeout=timedelta(seconds=10),
        )
        dist.barrier()

    launcher = InProcessLauncher(2)
    for _ in range(2):  # they strike in each launch
        with (
            injected_faults([Fault(1, 1, "fail")]),
            pytest.raises(RankFailedError, match="purpose"),
        ):
            launcher.launch(work)
    launcher.launch(work)
    for fault in (Fault(2, 1, "add", at_step=1), Fault(1, 1, "drop", at_step=1)):
        with injected_faults([fault]), pytest.raises(ConfigError, match="elastic"):
            launcher.launch(work)


class Alone(SingleDeviceStrategy):
    """Several ranks, each of which trains for itself."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))

    @override
    def _configure_launcher(self) -> None:
        self._launcher = InProcessLauncher(2, is_elastic=True)


class Model(BoringModel):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("taken", float(self.global_step))
        return output

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Ends(pl.Callback):
    """Ends a thread in the middle of a step."""

    heard: list[int]

    def __init__(self, thread: int, error: BaseException) -> None:
        self.thread, self.error = thread, error

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if world().thread == self.thread and trainer.global_step == 3:
            raise self.error

    @override
    def on_exception(self, *_: Any) -> None:
        self.heard.append(world().thread)


def make_trainer(*callbacks: pl.Callback) -> pl.Trainer:
    return cpu_trainer(
        strategy=Alone(),
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=0,
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(("error", "heard"), [(RankDropped(), []), (SystemExit(143), [1])])
def test_callbacks_do_not_hear_of_a_rank_that_is_dropped(
    error: BaseException, heard: list[int]
) -> None:
    Ends.heard = []
    trainer = make_trainer(Ends(1, error))
    trainer.fit(Model())
    assert Ends.heard == heard
    assert trainer.global_step == 8


@pytest.mark.parametrize(("error", "heard"), [(RankDropped(), []), (SystemExit(143), [0])])
def test_the_trainer_is_as_after_a_fit_of_its_own(
    tmp_path: Path, error: BaseException, heard: list[int]
) -> None:
    Ends.heard = []
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(saver, Ends(0, error))
    strategy = trainer.strategy
    model = Model()
    layer = model.layer
    trainer.fit(model)
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert trainer.callback_metrics["taken"] == 7.0
    assert trainer.state.finished
    assert not trainer.training
    assert trainer.strategy is strategy
    assert trainer.lightning_module is model
    assert model.layer is layer
    assert Ends.heard == heard
    assert saver.best_model_path.endswith("step=8.ckpt")
    saved = torch.load(saver.best_model_path, weights_only=True)
    assert_equal(model.state_dict(), saved["state_dict"])
    check_that_it_goes_on(trainer, model, tmp_path)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def check_that_it_goes_on(trainer: pl.Trainer, model: pl.LightningModule, folder: Path) -> None:
    trainer.save_checkpoint(folder / "after.ckpt")
    saved = torch.load(folder / "after.ckpt", weights_only=True)
    assert saved["global_step"] == 8
    assert len(saved["optimizer_states"][0]["state"]) == 2
    assert_equal(model.state_dict(), saved["state_dict"])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert trainer.global_step == 12


class Noting(pl.Callback):
    """Keeps what it sees at the end, and the model."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.global_step)
        self.model, self.lock = pl_module, Lock()


class NotingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    @override
    def on_train_end(self) -> None:
        self.seen.append(self.global_step)
        self.layer.last = self.layer.weight  # type: ignore[assignment]
        self.twice = lambda: (self, 2 * self.layer.weight)


class Connection:
    def __deepcopy__(self, memo: object) -> "Connection":
        raise RuntimeError("one connection at a time")


class Connects(Model):
    connection: Connection | None = None

    @override
    def on_train_end(self) -> None:
        self.connection = Connection()


def test_a_failed_copy_of_what_a_survivor_has_set_is_told() -> None:
    """A failed copy of what a survivor set was passed over without a word."""
    trainer, model = make_trainer(Ends(0, RankDropped())), Connects()
    told = r"Connects\.connection is, after .* raised RuntimeError \(one connection at a time\)"
    with pytest.warns(UserWarning, match=told):
        trainer.fit(model)
    assert isinstance(model.connection, Connection)


def test_what_hooks_have_set_at_the_end_outlives_the_callers_thread() -> None:
    """What hooks have set at the end was lost with the caller's thread."""
    callbacks = [Noting(), Noting()]
    trainer, model = make_trainer(*callbacks, Ends(0, RankDropped())), NotingModel()
    seen = model.seen
    trainer.fit(model)
    assert seen == [8]
    assert model.seen is seen
    assert model.layer.last is model.layer.weight
    own, doubled = model.twice()
    assert own is model
    assert torch.equal(doubled, 2 * model.layer.weight)
    for one in callbacks:
        assert one.seen == [8]
        assert one.model is model
