"""Ranks that start at once: forked from a process that has imported what every rank needs.

    a test ──what to call, variables──> server ──fork──> rank 0, rank 1, ...
                                        has imported torch, Lightning and this package;
                                        has run nothing, so that it has one thread

To import torch and Lightning takes about seven seconds of CPU, most of what a test of real
processes would cost. A forked rank is a process of its own, with its own groups, sockets and
interpreter's end. What it shares with the other ranks, unlike one that a launcher starts, is the
order of its sets: `run_processes(..., fresh=True)` starts interpreters.
"""

import gc
import os
import pickle
import random
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import lightning.pytorch
import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_shard
import tests.strategies.parity
from tests.processes import Request, call

IMPORTED = (lightning.pytorch, lightning_shard, tests.strategies.parity)
_POLL_SECONDS = 0.01


def serve(requests: IO[bytes], replies: IO[bytes]) -> str | None:
    """Answer requests until there are no more.

    Returns:
        In a rank that has been forked: the folder of its call. None in the server.
    """
    while True:
        try:
            request: Request = pickle.load(requests)
        except EOFError:
            return None
        pids: list[int] = []
        for environment, log in zip(request.environments, request.logs, strict=True):
            pid = os.fork()
            if pid == 0:
                _become_rank(environment, log)
                return request.folder
            pids.append(pid)
        pickle.dump(_wait_for(pids, request.timeout_seconds, requests), replies)
        replies.flush()


def _become_rank(environment: Mapping[str, str], log: Path) -> None:
    """Take over, in a new process, what a launcher would have given to it."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as stream, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        for own in (1, 2):
            os.dup2(stream.fileno(), own)
    random.seed()
    np.random.seed()
    setattr(rank_zero_only, "rank", int(environment["RANK"]))  # noqa: B010  (read when imported)


def _wait_for(pids: Sequence[int], timeout_seconds: float, requests: IO[bytes]) -> list[int]:
    """Return the ranks' exit statuses; kill them when the time is over, or the test has gone."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(statuses) < len(pids):
        has_gone = bool(select.select([requests], [], [], _POLL_SECONDS)[0])
        for pid in pids:
            if pid not in statuses:
                if has_gone or time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
    return [statuses[pid] for pid in pids]


def _main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed here is no reply
    gc.collect()
    gc.freeze()  # a rank that collects garbage would copy all of it
    folder = serve(sys.stdin.buffer, replies)
    if folder is not None:
        call(folder)


if __name__ == "__main__":
    _main()
