"""What the launcher of processes tells the other ranks."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.environments.launchers.processes import _running


@pytest.mark.parametrize(
    ("function", "name"),
    [(TrainerFn.FITTING, "trainer.fit"), (TrainerFn.TESTING, "trainer.test"), (None, "the run")],
)
def test_the_run_is_called_as_users_call_it(function: TrainerFn | None, name: str) -> None:
    """The run was called after Lightning's enumeration."""
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.state.fn = function
    assert _running(trainer) == name


def test_a_run_without_a_trainer() -> None:
    assert _running(None) == "the run"
