"""What a Trainer and a module may ask for comes at the same steps, whatever ranks come and go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, Subset

from lightning_shard import ConfigError, ElasticStrategy, RankFailedError
from lightning_shard.testing import Fault
from tests.elastic.runs import NUM_SAMPLES, Classifier, Journal, fit, samples
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring(
    ".*callbacks used to create the checkpoint need to be",
    "The checkpoint was saved with .* samples in an optimizer",
    ".*smaller than the logging interval",
    "You're resuming from a checkpoint that ended before",
)

LOSS = [Fault(2, 3, "drop", at_step=4)]  # 3 ranks accumulate 2 batches where 4 took one
JOIN = [Fault(4, 1, "add", at_step=4)]
LOSS_AND_JOIN = [*LOSS, Fault(4, 1, "add", at_step=8)]
EVERY_SAMPLE = {epoch: list(range(NUM_SAMPLES)) for epoch in range(2)}


def saved(folder: Path, options: dict[str, Any], **saver: Any) -> list[Path]:
    """Fit undisturbed; return the checkpoints by step."""
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, **saver)]
    fit(trainer_options={"enable_checkpointing": True, "callbacks": callbacks, **options})
    return sorted(folder.iterdir(), key=lambda path: int(path.stem.split("step=")[1]))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [4, 3])
@pytest.mark.parametrize("faults", [[], [Fault(1, 3, "drop", at_step=5)]], ids=["", "loss"])
def test_a_checkpoint_of_a_validation_within_an_epoch_resumes_at_its_step(
    num_ranks: int, faults: list[Fault], tmp_path: Path
) -> None:
    """A checkpoint of a validation within an epoch was resumed a step further."""
    options = {"val_check_interval": 3}
    expected = fit(trainer_options=options)[0].losses()
    path = saved(tmp_path, options, monitor="val_loss")[0]
    assert path.stem.endswith("step=3")
    journal, trainer = fit(
        faults, num_ranks=num_ranks, ckpt_path=str(path), trainer_options=options, snapshot_every=1
    )
    assert trainer.global_step == 14
    losses = journal.losses()
    assert sorted(losses) == list(range(3, 14))
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-4)
    assert journal.samples()[1] == EVERY_SAMPLE[1]


@pytest.mark.slow
def test_weights_alone_are_no_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    """Weights alone were taken for a checkpoint to go back to."""
    callbacks = [
        ModelCheckpoint(tmp_path, "whole-{step}", every_n_train_steps=4, save_top_k=-1),
        ModelCheckpoint(
            tmp_path, "weights-{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True
        ),
    ]
    both = [Fault(rank, 3, "drop", at_step=7) for rank in (1, 2)]  # with all copies of a part
    journal, trainer = fit(
        both, trainer_options={"enable_checkpointing": True, "callbacks": callbacks}
    )
    assert trainer.global_step == 14
    assert journal.samples() == EVERY_SAMPLE


@pytest.mark.slow
def test_a_file_whose_writer_was_lost_is_passed_over(tmp_path: Path) -> None:
    """A file whose writer was lost was taken for a checkpoint."""

    class Broken(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 6:
                (tmp_path / "step=7.ckpt").write_bytes(b"PK")

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver]}
    both = [Fault(rank, 3, "drop", at_step=7) for rank in (1, 2)]
    with pytest.warns(UserWarning, match=r"step=7\.ckpt cannot be read and is passed over"):
        journal, trainer = fit(both, module=Broken(Journal()), trainer_options=options)
    assert trainer.global_step == 14
    assert journal.samples() == EVERY_SAMPLE


def test_a_checkpoints_learning_rate_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """A checkpoint's learning rate stayed that of its number of ranks."""
    rates: dict[int, float] = {}

    class Watched(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            rates[self.global_step] = optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]

    scaling: Any = {"learning_rate_scaling": "linear"}
    options = {"enable_checkpointing": True, "max_steps": 5}
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(module=Watched(Journal()), trainer_options={**options, "callbacks": [saver]}, **scaling)
    (path,) = tmp_path.iterdir()
    options = {"max_steps": 7}
    fit(module=Watched(Journal()), trainer_options=options, **scaling)
    of_four = rates[6]
    fit(
        module=Watched(Journal()),
        num_ranks=2,
        ckpt_path=str(path),
        trainer_options=options,
        **scaling,
    )
    assert rates[6] == pytest.approx(of_four / 2, rel=1e-6)


def test_a_resumed_fit_has_the_global_batch_that_is_asked_for(tmp_path: Path) -> None:
    """A resumed fit passed over the global batch that was asked for."""
    path = saved(tmp_path, {"max_steps": 5}, every_n_train_steps=5)[0]
    journal, _ = fit(ckpt_path=str(path), global_batch_size=32, trainer_options={"max_steps": 9})
    sizes = {
        step: sum(len(one.samples) for one in of) for (_, step), of in journal.counted().items()
    }
    assert sizes == {5: 20, 6: 32, 7: 32, 8: 32}  # 20 were left of the epoch


# --- schedules ------------------------------------------------------------------------------------


class Scheduled(Classifier):
    """Writes the rates that each rank steps with."""

    def __init__(self, make: Callable[["Scheduled", Any], LRScheduler], **config: Any) -> None:
        super().__init__(Journal())
        self.make, self.config = make, config
        self.rates: dict[int, dict[int, set[float]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scheduled":
        copy = Scheduled(self.make, **self.config)
        copy.journal, copy.rates = self.journal, self.rates
        copy.load_state_dict(self.state_dict())
        return copy

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        schedule = self.make(self, optimizer)
        config = {"scheduler": schedule, "interval": "step", **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        generation = self.trainer.strategy.generation.number  # type: ignore[attr-defined]
        rate = round(self.trainer.optimizers[0].param_groups[0]["lr"], 8)
        self.rates.setdefault(self.global_step, {}).setdefault(generation, set()).add(rate)

    def last_rates(self) -> dict[int, set[float]]:
        """Of the last generation to try each step."""
        return {step: tried[max(tried)] for step, tried in self.rates.items()}


def one_cycle(module: Scheduled, optimizer: Any) -> LRScheduler:
    steps = int(module.trainer.estimated_stepping_batches)
    return OneCycleLR(optimizer, 3e-2, total_steps=steps)


def down_to_zero(module: Scheduled, optimizer: Any) -> LRScheduler:
    steps = int(module.trainer.estimated_stepping_batches)
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def by_ranks(module: Scheduled, optimizer: Any) -> LRScheduler:
    steps = 56 // module.trainer.world_size
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def halves(module: Scheduled, optimizer: Any) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("make", "config", "faults"),
    [
        (one_cycle, {}, LOSS),
        (down_to_zero, {}, JOIN),
        (by_ranks, {}, JOIN),
        (halves, {"frequency": 2}, LOSS),
        pytest.param(one_cycle, {}, JOIN, marks=pytest.mark.slow),
        pytest.param(down_to_zero, {}, LOSS, marks=pytest.mark.slow),
        pytest.param(by_ranks, {}, LOSS, marks=pytest.mark.slow),
        pytest.param(halves, {"frequency": 2}, JOIN, marks=pytest.mark.slow),
    ],
)
def test_schedules_go_their_way_after_a_change(
    make: Any, config: dict[str, Any], faults: list[Fault]
) -> None:
    """Schedules went another way after a change."""
    undisturbed, disturbed = Scheduled(make, **config), Scheduled(make, **config)
    fit(module=undisturbed)
    journal, _ = fit(faults, module=disturbed)
    assert disturbed.last_rates() == undisturbed.last_rates()
    assert len(disturbed.last_rates()) == 14
    assert journal.samples() == EVERY_SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 2])
def test_data_that_configure_optimizers_asks_for_is_that_of_the_checkpoint(
    num_ranks: int, tmp_path: Path
) -> None:
    """Data that `configure_optimizers` had asked for was not that of the checkpoint."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver]}
    undisturbed = Scheduled(one_cycle)
    expected, _ = fit(module=undisturbed, trainer_options=options)
    (path,) = tmp_path.glob("*step=5.ckpt")
    resumed = Scheduled(one_cycle)
    journal, _ = fit(module=resumed, num_ranks=num_ranks, ckpt_path=str(path))
    rates = undisturbed.last_rates()
    assert resumed.last_rates() == {step: rates[step] for step in range(5, 14)}
    losses = {step: loss for step, loss in expected.losses().items() if step >= 5}
    assert journal.losses() == pytest.approx(losses, rel=1e-4)


# --- validations and limits -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"val_check_interval": 0.25}, marks=pytest.mark.slow),
        {"val_check_interval": 0.3},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "faults", [pytest.param(LOSS, marks=pytest.mark.slow), LOSS_AND_JOIN], ids=["loss", "and join"]
)
def test_validations_come_at_the_same_steps_after_a_loss(
    options: dict[str, Any], faults: list[Fault]
) -> None:
    """Validations came at other steps after a loss."""
    expected = fit(trainer_options=options, max_epochs=3)[0].validations
    got = fit(faults, trainer_options=options, max_epochs=3)[0].validations
    assert list(got) == list(expected)  # ranks share the samples of one otherwise
    assert len(got) > 1


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], LOSS], ids=["", "loss"])
def test_a_time_between_validations_is_no_number_of_batches(faults: list[Fault]) -> None:
    """A time between validations was taken for batches."""
    options = {"val_check_interval": "00:01:00:00", "check_val_every_n_epoch": None}
    module = Scheduled(halves, frequency=2)
    journal, trainer = fit(faults, module=module, trainer_options=options)
    assert trainer.global_step == 14
    assert journal.samples() == EVERY_SAMPLE
    assert module.last_rates()[6] == {round(3e-2 / 8, 8)}


@pytest.mark.slow
def test_fewer_batches_than_between_two_validations_do_not_end_the_job() -> None:
    """Fewer batches than between two validations ended the job."""
    options = {"val_check_interval": 10, "accumulate_grad_batches": 2}
    two = [Fault(rank, 1, "add", at_step=2) for rank in (2, 3)]
    expected, _ = fit(num_ranks=2, trainer_options=options)
    journal, _ = fit(two, num_ranks=2, trainer_options=options)
    assert journal.samples() == EVERY_SAMPLE
    assert list(journal.validations) == list(expected.validations) == [5, 12]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("limit", "num_samples"), [(0.6, 64), (3, 48)])
def test_a_limit_of_batches_cut_a_step_in_two_after_a_loss(limit: float, num_samples: int) -> None:
    options = {"limit_train_batches": limit}
    expected, _ = fit(trainer_options=options)
    journal, _ = fit([Fault(2, 3, "drop", at_step=1)], trainer_options=options)
    assert journal.samples() == expected.samples()
    assert {len(seen) for seen in journal.samples().values()} == {num_samples}
    assert journal.losses() == pytest.approx(expected.losses(), rel=1e-4)


@pytest.mark.slow
def test_an_epoch_after_one_that_was_cut_short_has_all_samples() -> None:
    """An epoch that was cut short left samples out after a later loss."""

    class CutShort(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and self.global_step >= 5 else None

    journal, trainer = fit([Fault(2, 1, "drop", at_step=7)], module=CutShort(Journal()))
    assert trainer.global_step == 12
    assert {epoch: len(seen) for epoch, seen in journal.samples().items()} == {0: 80, 1: 100}


def test_drop_last_drops_a_batch_and_not_a_full_step() -> None:
    """`drop_last` dropped a full step and not a batch."""

    class Dropping(Classifier):
        def train_dataloader(self) -> Any:
            return DataLoader(samples(), batch_size=4, shuffle=True, drop_last=True)

    module = Dropping(Journal())
    fit_by_itself(module, accumulate_grad_batches=4)
    assert {len(seen) for seen in module.journal.samples().values()} == {96}


def test_a_smaller_dataset_of_a_later_epoch_begins_at_its_beginning() -> None:
    """A smaller dataset of a later epoch was taken up where the last had ended."""

    class Shrinking(Classifier):
        def train_dataloader(self) -> Any:
            data = Subset(samples(), range(50 if self.current_epoch else NUM_SAMPLES))
            return DataLoader(data, batch_size=4, shuffle=True)

    module = Shrinking(Journal())
    fit_by_itself(module, reload_dataloaders_every_n_epochs=1)
    assert {epoch: len(seen) for epoch, seen in module.journal.samples().items()} == {0: 100, 1: 50}


def fit_by_itself(module: L.LightningModule, **options: Any) -> None:
    """Fit a module that brings its own data."""
    L.seed_everything(1, verbose=False)
    cpu_trainer(
        strategy=ElasticStrategy(backend="in_process", num_ranks=4),
        devices=1,
        max_epochs=2,
        **options,
    ).fit(module)


# --- who takes part -------------------------------------------------------------------------------


def test_too_few_ranks_at_the_start_save_their_state_and_end(tmp_path: Path) -> None:
    """Too few ranks at the start trained to the end."""
    with pytest.raises(RankFailedError, match=r"state after step 0 is saved in"):
        fit(num_ranks=2, min_ranks=3, trainer_options={"default_root_dir": tmp_path})
    assert (tmp_path / "elastic-step=0.ckpt").exists()


@pytest.mark.slow
def test_a_newcomer_with_another_model_does_not_end_the_job() -> None:
    """A newcomer with another model ended the job for all."""

    class Errors(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __deepcopy__(self, memo: dict[int, Any]) -> "Errors":
            return self

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.seen.append(f"{type(exception).__name__} {exception}")

    class Wider(Classifier):
        def configure_model(self) -> None:
            if not hasattr(self, "last"):
                is_newcomer = self.trainer.strategy.generation.number == 0  # type: ignore[attr-defined]
                self.last = nn.Linear(24, 5 if is_newcomer else 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.hidden(x)))[:, :4]

    module, errors = Wider(Journal()), Errors()
    with pytest.warns(
        UserWarning, match=r"went on without it: ConfigError: Rank 4.*is another than"
    ):
        fit(JOIN, module=module, trainer_options={"callbacks": [errors]})
    assert len(errors.seen) == 1  # the newcomer's
    assert module.journal.samples() == EVERY_SAMPLE


def test_the_learning_rate_finder_is_refused_by_name() -> None:
    """The learning rate finder failed when its trial was over."""
    with pytest.raises(ConfigError, match="learning-rate finder goes back"):
        fit(trainer_options={"callbacks": [LearningRateFinder(num_training_steps=5)]})
