"""The harness itself: environment, failures, time-outs."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.processes import ProcessesFailedError, run_processes, run_script


def describe(*, word: str) -> tuple[str, ...]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return (word, *(os.environ[name] for name in names))


def fail_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one had enough")


def own_state() -> dict[str, Any]:
    return {
        "threads": threading.active_count(),
        "rank": rank_zero_only.rank,
        "drawn": (random.random(), float(np.random.rand())),
    }


def sleep_long() -> None:
    time.sleep(600)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("fresh", [False, True])
def test_each_process_knows_its_rank(fresh: bool) -> None:
    assert run_processes(describe, 2, word="hi", fresh=fresh) == [
        ("hi", "0", "2", "127.0.0.1", "1"),
        ("hi", "1", "2", "127.0.0.1", "1"),
    ]


def test_a_failure_shows_the_output() -> None:
    with pytest.raises(ProcessesFailedError, match=r"(?s)rank 1 ended with 1.*rank one had enough"):
        run_processes(fail_on_rank_one, 2)


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ProcessesFailedError, match="rank 0 ended with -9"):
        run_processes(sleep_long, 1, timeout_seconds=2)


def test_a_forked_rank_has_no_more_than_a_launcher_would_give_it() -> None:
    first, second = run_processes(own_state, 2)
    assert first["threads"] == second["threads"] == 1
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["drawn"] != second["drawn"]


@pytest.mark.slow
def test_an_interrupted_call_does_not_leave_its_reply_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted call left its reply to the next."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tests.processes.pickle.load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_processes(fail_on_rank_one, 2)
    assert [rank for _, rank, *_ in run_processes(describe, 1, word="next")] == ["0"]


def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, sys; print(sys.argv[1], os.environ['RANK']); sys.exit(3)")
    finished = run_script(script, 2, "hello")
    assert [one.returncode for one in finished] == [3, 3]
    assert [one.output for one in finished] == ["hello 0\n", "hello 1\n"]
