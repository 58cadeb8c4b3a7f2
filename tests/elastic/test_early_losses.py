"""Ranks that are lost in a generation's first moments, in any order, on real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.patience import patient
from tests.processes import REPOSITORY


@pytest.mark.slow
def test_who_is_left_steps_again_whoever_was_lost_and_whenever() -> None:
    """Survivors stood still for the whole time-out, here ten minutes, after some losses."""
    command = [sys.executable, "-m", "tests.elastic.early_losses", "4", "40", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    driver = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **pipes)
    try:
        printed, errors = driver.communicate(timeout=patient(280))
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, errors
    said = json.loads(printed)
    assert said["statuses"] == [0, 0, 0]
    assert len(said["seconds"]) == 40
