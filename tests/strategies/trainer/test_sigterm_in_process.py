"""After a run in this process its SIGTERM is the caller's again, however the run has ended."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.testing import Fault, injected_faults
from tests.strategies.test_salvage import Raises, SendsSigterm, make_trainer, mine

pytestmark = [pytest.mark.filterwarnings("ignore")]
RANK_1 = frozenset({1})


class Caller:
    """Has a handler of its own, as a program has that uses the Trainer."""

    def __init__(self) -> None:
        self.received = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received += 1


@pytest.fixture
def caller() -> Iterator[Caller]:
    handler = Caller()
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, before)


def assert_is_the_callers(caller: Caller) -> None:
    assert signal.getsignal(signal.SIGTERM) is caller
    received = caller.received
    os.kill(os.getpid(), signal.SIGTERM)
    assert caller.received == received + 1


@pytest.mark.parametrize("strategy", ["zero2", "elastic"])
@pytest.mark.parametrize("hook", ["nowhere", "configure_optimizers", "training_step"])
def test_a_run_gives_sigterm_back(strategy: str, hook: str, caller: Caller, tmp_path: Path) -> None:
    trainer = make_trainer(strategy, tmp_path)
    try:
        trainer.fit(Raises(mine, frozenset({0, 1}), hook))
    except ValueError:
        assert hook != "nowhere"
    assert_is_the_callers(caller)
    trainer.validate(Raises(None), verbose=False)
    assert_is_the_callers(caller)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_elastic_run_that_loses_a_rank_gives_sigterm_back(
    rank: int, caller: Caller, tmp_path: Path
) -> None:
    trainer = make_trainer("elastic", tmp_path)
    with injected_faults([Fault(rank, 1, "drop", at_step=2)]):
        trainer.fit(Raises(None))
    assert trainer.global_step == 4
    assert_is_the_callers(caller)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero2", "local_sgd", "elastic"])
def test_the_runs_after_one_that_sigterm_has_ended_go_on_to_their_end(
    strategy: str, caller: Caller, tmp_path: Path
) -> None:
    ended = make_trainer(strategy, tmp_path)
    with pytest.raises(SIGTERMException):
        ended.fit(SendsSigterm(None, RANK_1))
    assert caller.received == 1  # Lightning calls it, too
    assert_is_the_callers(caller)
    ended.fit_loop.max_epochs = 2  # elastic ranks have come to the end of the first one
    for trainer in (make_trainer(strategy, tmp_path), ended):
        _fit_to_the_end(trainer)
    assert signal.getsignal(signal.SIGTERM) is caller


def _fit_to_the_end(trainer: pl.Trainer) -> None:
    before = trainer.global_step
    trainer.fit(Raises(None))
    assert trainer.global_step > before
    assert not trainer.received_sigterm
    assert trainer.state.finished
