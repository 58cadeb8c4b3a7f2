"""An elastic job whose first ranks are fewer than asked for: the same batch, the same rates."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.elastic.data_assignment import DataAssignment
from tests.elastic.runs import Classifier, Journal, fit
from tests.strategies.parity import ignoring

pytestmark = ignoring(".*callbacks used to create the checkpoint need to be")


def fit_on_fewer(most: int, **options: Any) -> Journal:
    """Ask for four ranks, of which so many may train at once."""
    with pytest.warns(UserWarning, match=rf"{most} of 4 ranks \(devices x num_nodes\) take part"):
        return fit(max_ranks=most, **options)[0]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("most", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"accumulate_grad_batches": 2}),
        (2, {"limit_train_batches": 5}),
        (2, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    ],
    ids=str,
)
def test_fewer_ranks_than_asked_for_take_the_same_steps(most: int, options: Any) -> None:
    """Those that came first made steps of their own number: 80 of 8 samples for 40 of 16."""
    expected, _ = fit(trainer_options=options)
    got = fit_on_fewer(most, trainer_options=options)
    assert got.losses() == pytest.approx(expected.losses(), rel=1e-4)
    assert got.samples() == expected.samples()
    assert got.validations.keys() == expected.validations.keys()


@pytest.mark.slow
def test_a_global_batch_that_is_asked_for_counts_on_fewer_ranks() -> None:
    expected, _ = fit(global_batch_size=24)
    got = fit_on_fewer(2, global_batch_size=24)
    assert got.losses() == pytest.approx(expected.losses(), rel=1e-4)


class Rates(Classifier):
    """Notes its learning rate."""

    def __init__(self) -> None:
        super().__init__(Journal())
        self.rate = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 0:
            self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]


def test_learning_rates_that_follow_the_ranks_are_for_all_that_were_asked_for() -> None:
    """The first ranks trained at the rate of all, with a share of their samples."""
    module = Rates()
    fit_on_fewer(2, module=module, learning_rate_scaling="linear", max_epochs=1)
    assert module.rate == pytest.approx(3e-2 / 2)


def test_a_checkpoint_of_another_batch_says_both_numbers(tmp_path: Path) -> None:
    """It went on with the checkpoint's without a word."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver], "max_steps": 4}
    fit(trainer_options=options)
    (path,) = tmp_path.glob("*.ckpt")
    with pytest.warns(UserWarning, match="with 16 samples .* 3 ranks would make 12"):
        fit(num_ranks=3, ckpt_path=str(path), max_epochs=1)


def test_a_job_that_is_restarted_says_on_what_its_steps_are_based() -> None:
    """How many ranks torchrun may start later nobody can know."""
    trainer: Any = type("Fake", (), {"accumulate_grad_batches": 1})
    assignment = DataAssignment(trainer, 2)
    assignment._num_ranks, assignment._global_batch = 2, 8
    with pytest.warns(UserWarning, match="8 samples, those of 2 ranks, which torchrun has started"):
        assignment.begin("torchrun")
    assignment.begin(None)
    wanted = DataAssignment(trainer, 2, 8)
    wanted._num_ranks = 2
    wanted.begin("torchrun")
