"""Lifelines of several ranks in one process: real sockets and threads, and a store of this test."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.authentication.token import JobAddress
from lightning_shard.backends.liveness import KeptLifeline, job_server
from lightning_shard.errors import RankFailedError
from tests.patience import patient
from tests.processes import free_port

LONG = timedelta(minutes=5)
TOKEN = "token of the tests"
HERE = JobAddress(host="127.0.0.1", port=0, token=TOKEN)
STRANGE_WORDS = (
    b'{"nonce": "0", "service": "lifeline", "proof": "guess"}\n',
    b"GET / HTTP/1.1\r\n\r\n",
    # Each of these once ended the hub's thread, and with it the run.
    b'{"nonce": "0", "service": "lifeline", "proof": "\\ud800"}\n',
    b"[" * 100_000 + b"\n",
)


def meet(num_ranks: int, timeout: timedelta) -> list[KeptLifeline]:
    """Connect the ranks, with the server of this process."""
    address = job_server.serve(HERE)

    def join(rank: int) -> KeptLifeline:
        return KeptLifeline(
            address, rank=rank, world_size=num_ranks, timeout=timeout, look=lambda: None
        )

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join, range(num_ranks)))


@pytest.fixture
def ranks() -> Iterator[list[KeptLifeline]]:
    threads = meet(3, LONG)
    for thread in threads:
        thread.lifeline.await_all(60)
    yield threads
    for thread in threads:
        thread.leave()


def until(holds: Callable[[], bool]) -> None:
    deadline = monotonic() + patient(60)
    while not holds():
        assert monotonic() < deadline, "it did not happen"
        sleep(0.005)


def has_failed(thread: KeptLifeline) -> bool:
    try:
        thread.lifeline.check("test")
    except RankFailedError:
        return True
    return False


def die(thread: KeptLifeline) -> None:
    """End a rank's connection as the system does for a killed process."""
    thread.kept._connection._stream.shutdown(socket.SHUT_RDWR)


def test_a_death_reaches_everybody(ranks: list[KeptLifeline]) -> None:
    die(ranks[1])
    for thread in (ranks[0], ranks[2]):
        until(lambda thread=thread: has_failed(thread))
        with pytest.raises(RankFailedError, match="lost a peer in recv: rank 1 died; it was comp"):
            thread.lifeline.check("recv")


def test_a_rank_that_raises_is_quoted(ranks: list[KeptLifeline]) -> None:
    ranks[2].lifeline.announce_failure(ValueError("on purpose"))
    until(lambda: has_failed(ranks[0]) and has_failed(ranks[1]))
    with pytest.raises(RankFailedError, match="rank 2 raised ValueError: on purpose"):
        ranks[1].lifeline.check("recv")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_leaving_in_any_order_is_silent(
    order: tuple[int, ...], ranks: list[KeptLifeline], capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in order:
        ranks[rank].leave()
        assert ranks[rank].thread.is_alive() == (rank == 0)  # the server, which stays
    assert not any(map(has_failed, ranks))
    assert capfd.readouterr().err == ""


def test_rank_0_s_last_words_reach_the_others(ranks: list[KeptLifeline]) -> None:
    ranks[0].lifeline.announce_failure(ValueError("on purpose"))
    ranks[0].leave()
    until(lambda: has_failed(ranks[1]) and has_failed(ranks[2]))
    with pytest.raises(RankFailedError, match="rank 0 raised ValueError"):
        ranks[2].lifeline.check("recv")


def test_a_signal_that_only_the_thread_hears_of_stops_all(ranks: list[KeptLifeline]) -> None:
    os.write(ranks[1].thread.signal_fd, bytes([signal.SIGTERM]))
    until(lambda: all(thread.lifeline.terminated_rank == 1 for thread in ranks))
    assert [thread.lifeline.step() for thread in ranks] == [True] * 3
    assert [thread.lifeline.was_terminated for thread in ranks] == [False, True, False]
    assert not any(map(has_failed, ranks))


def test_a_stranger_is_shown_the_door(ranks: list[KeptLifeline]) -> None:
    server = job_server.current()
    assert server is not None
    for words in STRANGE_WORDS:
        with socket.create_connection((HERE.host, server.port)) as stranger:
            stranger.settimeout(60)
            stranger.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 12):
                    pass  # the challenge, and the end
    assert server.is_alive()
    assert not any(map(has_failed, ranks))


@pytest.mark.parametrize("rank", [3, 0.5])
def test_a_rank_beyond_those_that_meet_is_shown_the_door(
    rank: Any, ranks: list[KeptLifeline]
) -> None:
    """The server counted by the rank's own number of ranks, and ended when that rank had gone."""
    server = job_server.current()
    assert server is not None
    address = replace(HERE, port=server.port)
    stranger = KeptLifeline(address, rank=rank, world_size=5, timeout=LONG, look=lambda: None)
    until(lambda: has_failed(stranger))
    stranger.leave()
    assert server.is_alive()
    assert not any(map(has_failed, ranks))


def test_silence_is_noticed_on_both_ends() -> None:
    threads = meet(3, timedelta(seconds=1))
    goes_on = Event()
    threads[1].thread.call(goes_on.wait)  # rank 1 has connected and says nothing
    for thread in (threads[0], threads[2]):
        until(lambda thread=thread: has_failed(thread))
        with pytest.raises(RankFailedError, match=r"rank 1 fell silent for \d"):
            thread.lifeline.check("recv")
    goes_on.set()
    for thread in threads:
        thread.leave()


def test_a_system_without_fork_imports_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system without fork could not import the package."""
    monkeypatch.delattr(os, "register_at_fork")
    assert "start" in runpy.run_path(str(liveness.__file__))


def test_one_rank_needs_no_lifeline() -> None:
    liveness.start(HERE, rank=0, world_size=1, timeout=LONG)
    assert liveness.current() is None
    liveness.stop()


def test_rank_0_cannot_be_reached() -> None:
    nobody = replace(HERE, port=free_port())
    with pytest.raises(RankFailedError, match="Rank 1 of 2 could not set up its control conn"):
        liveness.start(nobody, rank=1, world_size=2, timeout=timedelta(seconds=1))
    assert liveness.current() is None


def end_in_an_exception(rank: int, port: int, error: BaseException | None) -> None:
    """Be a rank that ends as the others do, or in `error`."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    if rank == 0:
        job_server.tell_address(store, job_server.serve(HERE))
    address = job_server.told_address(store, TOKEN)
    liveness.start(address, rank=rank, world_size=2, timeout=LONG)
    lifeline = liveness.current()
    assert lifeline is not None
    if rank == 0:
        store.set("rank 0 has started", "")
        ended = "raised" if error is not None else "left"
        until(lambda: ended in str(lifeline.explain("test", wait_seconds=0.1)))
        return
    store.get("rank 0 has started")
    if error is not None:
        raise error


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit(3), None, SystemExit(0)])
def test_a_process_of_multiprocessing_that_raises_has_not_left_in_order(
    error: BaseException | None,
) -> None:
    """A process of multiprocessing that raised had left in order."""
    seen = error if getattr(error, "code", 1) else None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = free_port()
    other = context.Process(target=end_in_an_exception, args=(1, port, error))
    asking = context.Process(target=end_in_an_exception, args=(0, port, seen))
    for process in (asking, other):
        process.start()
    for process in (asking, other):
        process.join()
    assert asking.exitcode == 0
    assert bool(other.exitcode) == (seen is not None)
