"""Elastic fits on in-process ranks: whatever goes wrong, the training is the undisturbed one."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import LBFGS
from torch.utils.data import DataLoader

from lightning_shard import ConfigError, ElasticStrategy, RankFailedError
from lightning_shard.testing import Fault
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

pytestmark = ignoring(
    ".*callbacks used to create the checkpoint need to be",
    "The checkpoint was saved with .* samples in an optimizer",
    ".*smaller than the logging interval",
)

SCHEMES = ("shard_ddp", "zero1", "zero2", "zero3")
EVERY_SAMPLE = {epoch: list(range(NUM_SAMPLES)) for epoch in range(2)}


@cache
def undisturbed() -> Journal:
    """The same training on ranks that stay."""
    return fit()[0]


def assert_same_training(journal: Journal) -> None:
    """Every sample once per epoch, and the same losses."""
    expected = undisturbed()
    assert journal.samples() == EVERY_SAMPLE
    assert journal.losses() == pytest.approx(expected.losses(), rel=1e-4)
    assert set(journal.hooks) == set(expected.hooks)


def test_undisturbed_ranks_see_each_sample_once() -> None:
    journal = undisturbed()
    assert journal.samples() == EVERY_SAMPLE
    assert journal.hooks == [
        ("train", 0),
        ("epoch", 0),
        ("epoch end", 0),
        ("epoch", 1),
        ("epoch end", 1),
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "scheme",
    [
        "shard_ddp",
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "zero3",
    ],
)
def test_a_rank_is_lost_and_another_joins(scheme: Any) -> None:
    faults = [Fault(2, 3, "drop", at_step=4), Fault(4, 1, "add", at_step=8)]
    journal, trainer = fit(faults, scheme=scheme)
    assert_same_training(journal)
    sizes = {one.generation: set() for one in journal.attempts}
    for one in journal.attempts:
        sizes[one.generation].add(one.rank)
    assert [len(ranks) for ranks in sizes.values()] == [4, 3, 4]
    assert trainer.callback_metrics["train_loss_epoch"] > 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2"])
def test_at_most_snapshot_every_steps_are_done_again(scheme: Any) -> None:
    journal, _ = fit([Fault(1, 1, "drop", at_step=5)], scheme=scheme)
    reached = max(one.step for one in journal.attempts if one.generation == 1)
    again = min(one.step for one in journal.attempts if one.generation == 2)
    assert (reached, again) == (5, 5 if scheme == "shard_ddp" else 3)


@pytest.mark.parametrize(
    "trainer_options",
    [
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-true"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("scheme", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_options_of_the_trainer_stay_in_force(trainer_options: Any, scheme: Any) -> None:
    expected, _ = fit(scheme=scheme, trainer_options=trainer_options)
    faults = [Fault(2, 3, "drop", at_step=2), Fault(1, 1, "leave", at_step=4)]
    journal, _ = fit(faults, scheme=scheme, trainer_options=trainer_options)
    rel = 1e-4 if "precision" not in trainer_options else 3e-2  # sums in other orders, rounded
    assert journal.samples() == EVERY_SAMPLE
    assert journal.losses() == pytest.approx(expected.losses(), rel=rel)


def test_a_newcomer_at_an_epochs_end_has_clipped_nothing_yet() -> None:
    """The job ended: ranks compared what they had clipped by last, and it had done no step."""
    options = {"gradient_clip_val": 0.5, "limit_train_batches": 6, "limit_val_batches": 0}
    faults = [Fault(4, 1, "add", at_step=4), Fault(0, 1, "leave", at_step=6)]
    _, trainer = fit(faults, snapshot_every=3, scheme="zero3", trainer_options=options)
    assert trainer.current_epoch == trainer.max_epochs


@pytest.mark.slow
def test_the_rest_of_an_epoch_weighs_the_same_on_fewer_ranks() -> None:
    options = {"accumulate_grad_batches": 3}  # 48 samples in a step, and 4 in the last one
    expected, _ = fit(trainer_options=options)
    journal, _ = fit([Fault(2, 3, "drop", at_step=1)], trainer_options=options)
    assert journal.samples() == EVERY_SAMPLE
    assert journal.losses() == pytest.approx(expected.losses(), rel=1e-4)
    fewer, _ = fit(num_ranks=3, global_batch_size=48, trainer_options=options)
    assert fewer.losses() == pytest.approx(expected.losses(), rel=1e-4)


@pytest.mark.slow
def test_validation_comes_at_the_same_steps_where_more_batches_are_accumulated() -> None:
    options = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    expected, _ = fit(trainer_options=options)
    faults = [Fault(2, 3, "drop", at_step=4), Fault(1, 1, "leave", at_step=8)]
    journal, _ = fit(faults, trainer_options=options)
    assert list(expected.validations) == [3, 6, 9, 12]
    assert journal.validations.keys() == expected.validations.keys()


@pytest.mark.slow
def test_hooks_that_change_the_checkpoints_weights_find_their_names() -> None:
    class WithHooks(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].pop("head.weight")

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["state_dict"]["hidden.weight"].shape == (24, 8)

    journal, _ = fit([Fault(2, 2, "drop", at_step=4)], module=WithHooks(Journal()))
    assert journal.samples() == EVERY_SAMPLE


@pytest.mark.parametrize(
    "moment", [6, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 8, 10))]
)
def test_a_rank_may_be_lost_after_the_last_step(moment: int) -> None:
    journal, trainer = fit([Fault(2, moment, "drop", at_step=2 * STEPS_PER_EPOCH)])
    assert_same_training(journal)
    assert trainer.global_step == 2 * STEPS_PER_EPOCH


def test_rank_0_is_lost_and_the_caller_gets_the_trained_model() -> None:
    journal, trainer = fit([Fault(0, 2, "drop", at_step=9)])
    assert_same_training(journal)
    assert trainer.global_step == 2 * STEPS_PER_EPOCH
    assert "val_loss" in trainer.callback_metrics


@pytest.mark.slow
def test_a_rank_leaves_in_order_and_nothing_is_done_again() -> None:
    journal, _ = fit([Fault(3, 1, "leave", at_step=5)])
    assert_same_training(journal)
    assert len({(one.generation, one.step) for one in journal.attempts}) == 2 * STEPS_PER_EPOCH


def test_buddies_that_leave_at_once_take_no_state_along() -> None:
    journal, _ = fit([Fault(1, 1, "leave", at_step=2), Fault(2, 1, "leave", at_step=2)])
    assert_same_training(journal)


@pytest.mark.slow
def test_a_newcomer_at_an_epochs_end_takes_part_in_its_sums() -> None:
    journal, _ = fit([Fault(4, 1, "add", at_step=6)], snapshot_every=7)
    assert_same_training(journal)


@pytest.mark.slow
def test_a_second_fit_of_the_same_trainer_copies_what_the_first_remembers() -> None:
    """A second fit of the same trainer could not copy what the first remembered."""
    _, trainer = fit([Fault(0, 1, "drop", at_step=2), Fault(2, 1, "leave", at_step=2)])
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.max_epochs = 3
    module = trainer.lightning_module
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True))
    assert trainer.global_step == 3 * STEPS_PER_EPOCH


@pytest.mark.slow
def test_a_rank_that_fails_once_goes_on() -> None:
    journal, _ = fit([Fault(1, 2, "fail", at_step=4)])
    assert_same_training(journal)
    assert {one.rank for one in journal.attempts if one.step == 13} == {0, 1, 2, 3}


def test_the_users_own_error_is_raised_as_it_is() -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 2:
                raise ZeroDivisionError("the user's")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError, match="the user's"):
        fit(module=Broken(Journal()))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_too_many_lost_goes_back_to_the_newest_checkpoint(
    checkpoint_format: str, tmp_path: Path
) -> None:
    faults = [Fault(1, 3, "drop", at_step=8), Fault(2, 4, "drop", at_step=8)]  # buddies
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver]}
    journal, _ = fit(faults, trainer_options=options, checkpoint_format=checkpoint_format)
    assert journal.samples() == EVERY_SAMPLE
    assert journal.losses() == pytest.approx(undisturbed().losses(), rel=1e-4)


def test_too_many_lost_without_a_checkpoint_is_an_error_that_says_so() -> None:
    faults = [Fault(1, 3, "drop", at_step=8), Fault(2, 4, "drop", at_step=8)]
    with pytest.raises(Exception, match="saved none"):
        fit(faults)


@pytest.mark.slow
def test_a_checkpoint_that_the_callbacks_have_forgotten_is_found(tmp_path: Path) -> None:
    faults = [Fault(3, 3, "drop", at_step=5), Fault(0, 4, "drop", at_step=5)]  # buddies
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1)
    options = {"enable_checkpointing": True, "callbacks": [saver]}
    journal, _ = fit(faults, trainer_options=options, snapshot_every=4)
    assert journal.samples() == EVERY_SAMPLE


@pytest.mark.slow
def test_ranks_that_reconfigure_in_vain_end_with_their_error() -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 2:
                raise RankFailedError("a peer, or so it seems")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RankFailedError, match="or so it seems"):
        fit(module=Broken(Journal()), num_ranks=2)


@pytest.mark.slow
def test_below_min_ranks_it_saves_and_ends(tmp_path: Path) -> None:
    faults = [Fault(1, 1, "drop", at_step=8), Fault(3, 1, "drop", at_step=10)]
    with pytest.raises(RankFailedError, match="is saved in"):
        fit(faults, min_ranks=3, trainer_options={"default_root_dir": tmp_path})
    (path,) = tmp_path.glob("*.ckpt")
    journal, _ = fit(ckpt_path=str(path), num_ranks=3)
    expected = undisturbed().losses()
    assert journal.losses() == pytest.approx({s: expected[s] for s in journal.losses()}, rel=1e-4)
    assert min(journal.losses()) <= 10
    assert max(journal.losses()) == 2 * STEPS_PER_EPOCH - 1


@pytest.mark.slow
def test_above_max_ranks_a_newcomer_waits_for_room() -> None:
    faults = [Fault(4, 1, "add", at_step=2), Fault(1, 1, "drop", at_step=8)]
    journal, _ = fit(faults, max_ranks=4)
    assert_same_training(journal)
    sizes = {
        one.step: max(o.rank for o in journal.attempts if o.step == one.step)
        for one in journal.attempts
    }
    assert set(sizes.values()) == {3}


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_at_another_size(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(trainer_options={"enable_checkpointing": True, "callbacks": [saver]})
    (path,) = tmp_path.glob("*step=4.ckpt")
    journal, _ = fit(ckpt_path=str(path), num_ranks=3)
    expected = undisturbed().losses()
    assert sorted(journal.losses()) == list(range(4, 2 * STEPS_PER_EPOCH))
    assert journal.losses() == pytest.approx({s: expected[s] for s in journal.losses()}, rel=1e-4)


@pytest.mark.slow
def test_the_learning_rate_is_scaled_where_the_batch_of_a_rank_is_held() -> None:
    journal, trainer = fit([Fault(2, 1, "drop", at_step=3)], learning_rate_scaling="linear")
    assert journal.samples() == EVERY_SAMPLE
    last = {one.step: len(one.samples) for one in journal.attempts if one.generation == 2}
    assert set(last.values()) >= {4}
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(3e-2 * 3 / 4)


def test_a_logger_sees_one_run_when_rank_0_is_lost(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 1}
    fit([Fault(0, 1, "drop", at_step=9)], trainer_options=options)
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "tensor_parallel"}, "scheme must be 'shard_ddp' or .*schemes have parts"),
        ({"backend": "mpi"}, "cannot be elastic"),
        ({"backend": "shm"}, "cannot be elastic"),
        ({"snapshot_every": 0}, "snapshot_every must be .* of at least 1"),
        ({"min_ranks": 3, "max_ranks": 2}, "min_ranks <= max_ranks"),
        ({"global_batch_size": 8, "learning_rate_scaling": "sqrt"}, "Leave one of them out"),
        ({"learning_rate_scaling": "cubic"}, "'linear' or 'sqrt' or None"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticStrategy(**options)


def test_what_is_not_elastic_is_refused_before_training() -> None:
    for callback, message in (
        (GradientAccumulationScheduler({0: 1, 2: 4}), "GradientAccumulationScheduler"),
        (WeightAveraging(), "averages"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(trainer_options={"callbacks": [callback]}, num_ranks=2)

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.hidden)

        def finetune_function(self, *_: Any) -> None:
            pass

    class Closures(Classifier):
        def configure_optimizers(self) -> Any:
            return LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="unfreezes"):
        fit(trainer_options={"callbacks": [Unfreezing()]}, num_ranks=2)
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(module=Closures(Journal()), num_ranks=2, scheme="shard_ddp")

    class Manual(Classifier):
        automatic_optimization = False

    with pytest.raises(ConfigError, match="optimizes manually"):
        fit(module=Manual(Journal()), num_ranks=2)


def _was_just_lost(faults: list[Fault], step: int) -> bool:
    """Whether a rank is lost so shortly before that its buddy might be lost with it."""
    return any(one.kind == "drop" and step - (one.at_step or 0) < 3 for one in faults)


def random_faults(seed: int) -> list[Fault]:
    """Losses, departures and newcomers at random moments; two ranks stay at any time."""
    chance = random.Random(seed)
    there, step, faults = list(range(4)), 0, []
    for _ in range(chance.randint(1, 4)):
        step = chance.randint(step, 2 * STEPS_PER_EPOCH - 1)
        kind: Any = chance.choice(["drop", "drop", "add", "leave"])
        if kind == "add":
            there.append(4 + sum(one.kind == "add" for one in faults))
            faults.append(Fault(there[-1], 1, "add", at_step=step))
        elif len(there) > 2 and (kind == "leave" or not _was_just_lost(faults, step)):
            rank = there.pop(chance.randrange(len(there)))
            moment = chance.randint(1, 9) if kind == "drop" else 1
            faults.append(Fault(rank, moment, kind, at_step=step))
    return faults


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 200))]
)
def test_random_losses_and_newcomers(seed: int) -> None:
    chance = random.Random(seed)
    scheme: Any = chance.choice(SCHEMES)
    journal, _ = fit(random_faults(seed), scheme=scheme, snapshot_every=chance.choice([1, 2, 3, 5]))
    assert_same_training(journal)
