"""The handler of SIGTERM, and what it needs of Lightning."""

import inspect
import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.trainer import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.backends.liveness import thread
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.thread import TERMINATED_STATUS, TOGETHER_SECONDS
from lightning_shard.strategies.trainer.termination import RequeueHandler, TerminationHandler
from tests.processes import run_alone
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import UPSTREAM_WARNINGS, GlobalBatches, quiet_trainer


class Announcements(Lifeline):
    """Counts them."""

    is_ending = False

    def __init__(self) -> None:
        self.number = 0

    def announce_termination(self) -> None:
        self.number += 1


def test_lightning_registers_the_handler_that_it_finds_after_the_environment() -> None:
    registering = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "[self._sigterm_notifier_fn]" in registering
    assert "append(self._slurm_sigusr_handler_fn)" in registering
    running = inspect.getsource(Trainer._run)
    assert running.index("setup_environment()") < running.index("register_signal_handlers()")


def test_the_exception_ends_the_process_with_the_signals_status() -> None:
    assert SIGTERMException(TERMINATED_STATUS).code == 128 + 15


def test_the_first_signal_is_announced() -> None:
    lifeline = Announcements()
    TerminationHandler(lifeline)(signal.SIGTERM, None)
    assert lifeline.number == 1


def test_a_rank_that_is_ending_takes_its_time() -> None:
    lifeline = Announcements()
    lifeline.is_ending = True
    handler = TerminationHandler(lifeline)
    for _ in range(3):
        handler(signal.SIGTERM, None)
    assert lifeline.number == 3


def test_lightning_saves_and_requeues_with_the_names_that_are_exchanged() -> None:
    handling = inspect.getsource(_SignalConnector._slurm_sigusr_handler_fn)
    places = "self.trainer._checkpoint_connector.hpc_save_path(self.trainer.default_root_dir)"
    assert f"= {places}" in handling
    assert "self.trainer.save_checkpoint(hpc_save_path)" in handling


def test_a_forked_child_passes_over_slurms_signal() -> None:
    told = Announcements()
    told.announce_requeue = lambda: os._exit(1)  # type: ignore[method-assign]
    handler = RequeueHandler(told)
    if (child := os.fork()) == 0:
        handler(signal.SIGUSR1, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def outcome(call: str) -> int:
    code = f"from tests.strategies.trainer.test_termination import {call}; {call}()"
    return run_alone("-c", code).returncode


def receive(*seconds: float) -> None:
    handler = TerminationHandler(Announcements())
    for now in seconds:
        with patch.object(thread, "monotonic", lambda now=now: now):
            handler(signal.SIGTERM, None)


def receive_insisting() -> None:
    receive(100.0, 101.0 + TOGETHER_SECONDS)


def receive_in_a_child() -> None:
    handler = TerminationHandler(Announcements())
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_that_comes_again_later_ends_the_rank_at_once() -> None:
    assert outcome("receive_insisting") == TERMINATED_STATUS


def test_the_schedulers_signal_and_the_launchers_leave_time_to_save() -> None:
    """The scheduler's signal and the launcher's left no time to save."""
    receive(100.0, 100.5, 101.0)


@pytest.mark.slow
def test_a_forked_child_ends_as_any_process_does() -> None:
    assert outcome("receive_in_a_child") == 0


@pytest.mark.filterwarnings(*(f"ignore:{one}" for one in UPSTREAM_WARNINGS))
def test_ranks_with_a_lifeline_ask_nobody_before_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning has each rank wait for its device before every batch, to read rank 0's answer."""

    def asks(self: Any) -> None:
        raise AssertionError("Rank 0 was asked whether it got SIGTERM.")

    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", asks)
    model = ExampleGPT()
    trainer = quiet_trainer(strategy="zero1_in_process", devices=2, max_steps=2)
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=2))
    assert trainer.global_step > 0
