"""The handler of SIGTERM, and what it needs of Lightning."""

import inspect
import os
import signal
import subprocess
import sys
from unittest.mock import patch

from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.trainer import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.backends.liveness import TERMINATED_STATUS, Lifeline, termination
from lightning_shard.backends.liveness.termination import TOGETHER_SECONDS
from lightning_shard.trainer.termination import TerminationHandler
from tests.processes import REPOSITORY


class Announcements(Lifeline):
    """Counts them."""

    has_verdict = False

    def __init__(self) -> None:
        self.number = 0

    def announce_termination(self) -> None:
        self.number += 1


def test_lightning_registers_the_handler_that_it_finds_after_the_environment() -> None:
    registering = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "[self._sigterm_notifier_fn]" in registering
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
    lifeline.has_verdict = True
    handler = TerminationHandler(lifeline)
    for _ in range(3):
        handler(signal.SIGTERM, None)
    assert lifeline.number == 3


def outcome(call: str) -> int:
    code = f"from tests.trainer.test_termination import {call}; {call}()"
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode


def receive(*seconds: float) -> None:
    handler = TerminationHandler(Announcements())
    for now in seconds:
        with patch.object(termination, "monotonic", lambda now=now: now):
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


def test_a_signal_that_comes_again_later_ends_the_rank_at_once() -> None:
    assert outcome("receive_insisting") == TERMINATED_STATUS


def test_the_schedulers_signal_and_the_launchers_left_no_time_to_save() -> None:
    receive(100.0, 100.5, 101.0)


def test_a_forked_child_ends_as_any_process_does() -> None:
    assert outcome("receive_in_a_child") == 0
