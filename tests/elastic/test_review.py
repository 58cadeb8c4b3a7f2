"""What elastic fits have got wrong when ranks were lost or came, named after what went wrong."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lightning_shard import ElasticStrategy
from lightning_shard.errors import ConfigError
from lightning_shard.testing import Fault, injected_faults
from tests.elastic.runs import (
    BATCH_SIZE,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Classifier,
    Journal,
    fit,
    samples,
)
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring(
    ".*callbacks used to create the checkpoint need to be", ".*smaller than the logging interval"
)

A_LOSS_AND_A_NEWCOMER = [Fault(2, 1, "drop", at_step=5), Fault(4, 1, "add", at_step=4)]


class StopAtStepFive(Callback):
    """As EarlyStopping would, on every rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.should_stop = True


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults", [A_LOSS_AND_A_NEWCOMER[:1], A_LOSS_AND_A_NEWCOMER], ids=["lost", "and joined"]
)
def test_survivors_do_not_want_to_stop_at_a_step_that_was_taken_back(faults: list[Fault]) -> None:
    """Survivors still wanted to stop at a step that was taken back."""
    journal, trainer = fit(faults, trainer_options={"callbacks": [StopAtStepFive()]})
    assert trainer.global_step == 5
    assert sorted(journal.losses()) == list(range(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults", [[Fault(2, 2, "drop", at_step=5)], A_LOSS_AND_A_NEWCOMER], ids=["lost", "and joined"]
)
def test_a_step_that_is_done_again_is_saved_again_by_all_ranks(
    faults: list[Fault], tmp_path: Path
) -> None:
    """A step that was done again was not saved by ranks that had saved it."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [saver], "max_steps": 8}
    _, trainer = fit(faults, trainer_options={**options, "limit_val_batches": 0})
    kept: Any = trainer.checkpoint_callback
    assert Path(kept.best_model_path).exists()
    assert Path(kept.last_model_path).exists()


@pytest.mark.slow
def test_a_newcomer_knows_the_metric_by_which_the_others_save(tmp_path: Path) -> None:
    """A newcomer did not know the metric by which the others save."""
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=5, save_top_k=2)
    options = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    fit(
        [Fault(4, 1, "add", at_step=8)],
        trainer_options={**options, "enable_checkpointing": True, "callbacks": [saver]},
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "epoch=0-step=5.ckpt",
        "epoch=1-step=10.ckpt",
    }


@pytest.mark.slow
def test_a_timer_counts_the_time_before_a_loss_once() -> None:
    """A timer counted the time before a loss twice."""

    class Late(Timer):
        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            self._start_time[RunningStage.TRAINING] -= 1e6

    _, trainer = fit([Fault(1, 1, "drop", at_step=5)], trainer_options={"callbacks": [Late()]})
    (timer,) = (one for one in trainer.callbacks if isinstance(one, Late))  # type: ignore[attr-defined]
    assert 1e6 <= timer.time_elapsed() < 1.5e6


class CountsBatches(Callback):
    """Its state is what it goes on changing."""

    def __init__(self) -> None:
        self.state = {"batches": 0}

    def on_train_batch_start(self, *_: Any) -> None:
        self.state["batches"] += 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.state = state_dict


@pytest.mark.slow
def test_the_state_of_a_callback_is_remembered_as_it_was() -> None:
    """The state of a callback was remembered as it was later."""
    options = {"callbacks": [CountsBatches()], "max_steps": 6, "limit_val_batches": 0}
    _, trainer = fit(
        [Fault(2, 1, "drop", at_step=4)],
        scheme="shard_ddp",
        global_batch_size=12,  # one batch a step, on four ranks and on three
        trainer_options=options,
    )
    (counter,) = (one for one in trainer.callbacks if isinstance(one, CountsBatches))  # type: ignore[attr-defined]
    assert counter.state["batches"] == 6


class Stranger(Classifier):
    """A newcomer has another order of samples than the others."""

    is_stranger = False

    def train_dataloader(self) -> DataLoader[Any]:
        strategy: Any = self.trainer.strategy
        self.is_stranger = self.is_stranger or strategy.generation.number == 0
        order = range(NUM_SAMPLES)
        sampler = list(reversed(order)) if self.is_stranger else list(order)
        return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=sampler)


@pytest.mark.slow
def test_a_newcomer_with_another_order_of_samples_does_not_end_the_job() -> None:
    """A newcomer with another order of samples ended the job."""
    journal = Journal()
    trainer = new_trainer()
    with (
        injected_faults([Fault(3, 1, "add", at_step=4)]),
        pytest.warns(UserWarning, match="went on without it.*another order"),
    ):
        trainer.fit(Stranger(journal))
    assert journal.samples() == {0: list(range(NUM_SAMPLES))}
    assert trainer.global_step > 0


def new_trainer() -> L.Trainer:
    L.seed_everything(1, verbose=False)
    return cpu_trainer(
        strategy=ElasticStrategy(backend="in_process", num_ranks=3, snapshot_every=3),
        devices=1,
        max_epochs=1,
    )


class FailsOnceInValidation(Classifier):
    """On one rank, when others have gone further."""

    has_failed = False

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_rank == 0 and not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("the user's")


def seeded(kind: type[Classifier]) -> Classifier:
    """A module with the weights that all of them have."""
    L.seed_everything(1, verbose=False)
    return kind(Journal())


@pytest.mark.slow
def test_batches_of_a_validation_that_is_begun_again_count_once() -> None:
    """Batches of a validation that was begun again counted twice."""
    expected, _ = fit(module=seeded(Classifier), max_epochs=1)
    journal, _ = fit(module=seeded(FailsOnceInValidation), max_epochs=1)
    assert journal.validations == pytest.approx(expected.validations, rel=1e-6)


class DecaysByEpochs(Classifier):
    """With the two kinds of schedulers that go by epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.by_metric:
            # no loss is ever better
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    by_metric = False


class DecaysByLosses(DecaysByEpochs):
    """After each epoch whose loss is no better."""

    by_metric = True


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DecaysByEpochs, DecaysByLosses])
@pytest.mark.parametrize(
    "fault",
    [Fault(1, 1, "drop", at_step=2), Fault(1, 1, "leave", at_step=STEPS_PER_EPOCH)],
    ids=["lost within", "left at the end"],
)
def test_an_epoch_that_is_taken_up_has_a_step_of_its_scheduler(
    kind: type[DecaysByEpochs], fault: Fault
) -> None:
    """An epoch that was taken up had no step of its scheduler."""
    _, trainer = fit([fault], module=seeded(kind), snapshot_every=1, num_ranks=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25)


class FailsAlike(Callback):
    """Every rank refuses the same step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ConfigError("of the third step")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], [Fault(1, 1, "drop", at_step=0)]], ids=["", "after a loss"])
def test_an_error_of_all_ranks_is_followed_by_no_other(
    faults: list[Fault],
) -> None:
    """They left it in their teardown, after which they waited for each other in its groups."""
    with pytest.raises(ConfigError, match="of the third step") as caught:
        fit(faults, trainer_options={"callbacks": [FailsAlike()]})
    assert not [note for note in caught.value.__notes__ if "has left" in note]


class Hears(Callback):
    """Notes what it hears of, and saves."""

    def __init__(self, folder: Path, heard: list[str]) -> None:
        self.folder, self.heard = folder, heard

    def __deepcopy__(self, memo: Any) -> "Hears":
        return Hears(self.folder, self.heard)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.heard.append(type(exception).__name__)
        trainer.save_checkpoint(self.folder / "on_exception.ckpt")


class FailsAlone(Classifier):
    """Raises wherever it is the second rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == 4:
            raise ZeroDivisionError("of the second rank")
        return super().training_step(batch, batch_idx)


def dropped(rank: int) -> Fault:
    return Fault(rank, 3, "drop", at_step=4)


ENDS: dict[str, tuple[list[Fault], Any, str, str]] = {
    "buddies": ([dropped(1), dropped(2)], Classifier, "CheckpointError", "saved none"),
    "all": ([dropped(rank) for rank in range(3)], Classifier, "RankFailedError", "All 3 ranks"),
    "leaves": ([Fault(0, 3, "leave", at_step=4)], Classifier, "SIGTERMException", ""),
    "evicted": ([], FailsAlone, "ZeroDivisionError", ""),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Thread . of the in-process ranks failed")
@pytest.mark.parametrize("end", ENDS)
def test_callbacks_heard_of_an_engine_that_is_gone_instead_of_the_error(
    end: str, tmp_path: Path
) -> None:
    """Between two generations no hook ran, and after the last rank's end a hook's error was all."""
    faults, kind, error, words = ENDS[end]
    heard: list[str] = []
    caught: BaseException | None = None
    try:
        options = {"callbacks": [Hears(tmp_path, heard)]}
        module = kind(Journal())
        fit(faults, num_ranks=3, module=module, trainer_options=options, max_failures=0)
    except Exception as raised:
        caught = raised
    assert set(heard) == {error}
    assert (caught is None) == (end in ("leaves", "evicted"))  # the others have gone on
    if caught is not None:
        assert type(caught).__name__ == error
        assert words in str(caught)
        assert not [
            note for note in caught.__notes__ if "no engine" in note or "all_gather" in note
        ]
