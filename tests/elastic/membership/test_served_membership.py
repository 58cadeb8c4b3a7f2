"""Membership over sockets: several members in one process, a rendezvous server on a thread."""

import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore
from lightning_shard.backends.authentication.store import store_at
from lightning_shard.backends.base import GlooBackend
from lightning_shard.backends.liveness import interruption
from lightning_shard.backends.liveness import thread as thread_module
from lightning_shard.backends.liveness.job_server import tell_address
from lightning_shard.backends.liveness.thread import TOGETHER_SECONDS
from lightning_shard.core import settings
from lightning_shard.elastic.membership import rendezvous_server as server_module
from lightning_shard.elastic.membership.generation import Generation, GroupSetup
from lightning_shard.elastic.membership.rendezvous_server import JobRules, start_rendezvous_server
from lightning_shard.elastic.membership.served_membership import ServedMembership
from lightning_shard.errors import ConfigError, EvictedError, JobOverError, RankFailedError
from lightning_shard.strategies.trainer.termination import TerminationHandler
from tests.elastic.rendezvous_servers import TOKEN, RunningServer, running_server, wait_until
from tests.patience import patient
from tests.processes import free_port, run_processes

TIMEOUT = timedelta(seconds=60)
RULES = JobRules(initial_size=2, max_ranks=3, max_failures=1, timeout_seconds=60.0)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make each call on a thread of its own, as processes would."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def begun(server: RunningServer) -> list[ServedMembership]:
    """Return the two members of generation 1."""
    members = [ServedMembership(server.job, rank, TIMEOUT) for rank in range(2)]
    generations = together(*(member.begin for member in members))
    names = tuple(member.me for member in members)
    for rank, generation in enumerate(generations):
        assert generation == Generation(number=1, members=names, me=names[rank])
        assert (generation.rank, generation.size) == (rank, 2)
    return members


def vanish(member: ServedMembership) -> None:
    """Close the connection without a word, as the end of a process does."""
    member._server._connection._stream.shutdown(2)


def test_a_newcomer_is_wanted_and_let_in_when_all_have_arrived() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        newcomer = ServedMembership(server.job, None, TIMEOUT)
        assert newcomer.begin() is None
        assert not zero.is_wanted
        with ThreadPoolExecutor(1) as thread:
            admitted = thread.submit(newcomer.following)
            wait_until(lambda: zero.is_wanted and one.is_wanted)
            generations = together(zero.following, one.following)
            assert admitted.result().members == (zero.me, one.me, newcomer.me)
        assert not zero.is_wanted
        assert {one.number for one in generations} == {2}
        assert generations[0].reason == "1 rank(s) joined"
        for member in (zero, one, newcomer):
            member.leave()


@pytest.mark.slow
def test_who_is_left_goes_on_and_whoever_waits_is_told_that_the_job_is_over() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        vanish(zero)
        generation = one.following()
        assert generation.members == (one.me,)
        assert generation.reason == f"rank 0 (member {zero.me}) died"
        one.leave()
        # The second when the server has ended already.
        with pytest.raises((JobOverError, RankFailedError)):
            ServedMembership(server.job, None, TIMEOUT).following()


def test_a_member_that_fails_too_often_is_evicted_with_its_error() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        together(lambda: zero.following(ValueError("no")), one.following)
        with ThreadPoolExecutor(1) as thread:
            after = thread.submit(one.following)
            with pytest.raises(EvictedError, match=r"failed 2 time\(s\), .* ValueError: still no"):
                zero.following(ValueError("still no"))
            assert after.result().members == (one.me,)
        zero.leave()
        one.leave()


def test_a_member_that_is_declared_dead_while_it_lives_comes_back_under_a_new_name() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        was = one.me

        def is_declared_dead() -> bool:
            """Have the server believe that it was silent for long, whatever it has just said."""
            if (known := server.server.membership_table._participants.get(was)) is not None:
                known.heard = -1e9
            return one._is_declared_dead

        wait_until(is_declared_dead)
        assert zero.following().members == (zero.me,)
        with ThreadPoolExecutor(1) as thread:
            back = thread.submit(one.following)
            wait_until(lambda: zero.is_wanted)
            zero.following()
            generation = back.result()
        assert one.me != was
        assert generation.members == (zero.me, one.me)
        zero.leave()
        one.leave()


def test_a_newcomer_that_is_asked_to_leave_waits_no_longer() -> None:
    with running_server(RULES) as server:
        members = begun(server)
        newcomer = ServedMembership(server.job, None, TIMEOUT)
        newcomer.ask_to_leave()
        assert newcomer.is_leaving
        with pytest.raises(JobOverError, match="asked to leave"):
            newcomer.following()
        for member in members:
            member.leave()


def test_sigterm_asks_to_leave_at_the_next_boundary() -> None:
    with running_server(RULES) as server:
        members = begun(server)
        before = signal.signal(signal.SIGTERM, TerminationHandler(members[0]))
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        wait_until(lambda: members[0].is_leaving)
        assert not members[1].is_leaving
        for member in members:
            member.leave()


def test_a_signal_that_the_main_thread_handles_late_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told by its thread at once and by its handler after a long step, a rank ended on the spot."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with running_server(RULES) as server:
        members = begun(server)
        handler = TerminationHandler(members[0].watch_signals())
        try:
            os.write(members[0]._thread.signal_fd, bytes([signal.SIGTERM]))
            wait_until(lambda: members[0].is_leaving)
            later = monotonic() + 2 * TOGETHER_SECONDS
            monkeypatch.setattr(thread_module, "monotonic", lambda: later)
            handler(signal.SIGTERM, None)
        finally:
            members[0].end_run()
            monkeypatch.undo()
        assert statuses == []
        for member in members:
            member.leave()


def test_a_peer_that_dies_before_it_is_ready_ends_the_wait_for_its_groups() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        generation = Generation(number=1, members=(zero.me, one.me), me=zero.me)
        with ThreadPoolExecutor(1) as thread:
            setup = GroupSetup(GlooBackend(), torch.device("cpu"), TIMEOUT)
            waiting = thread.submit(zero.init_groups, generation, setup)
            vanish(one)
            with pytest.raises(RankFailedError, match="rank 1 died"):
                waiting.result()
        zero.drop_groups()
        assert zero.following().members == (zero.me,)
        zero.leave()


def test_a_rank_0_that_dies_while_ranks_meet_is_not_waited_for() -> None:
    """The others waited the whole time-out for its door."""
    with running_server(RULES) as server:
        zero, one = begun(server)
        generation = Generation(number=1, members=(zero.me, one.me), me=one.me)
        store = PrefixStore("lightning_shard/generation1", store_at(zero._address, TIMEOUT))
        tell_address(store, replace(zero._address, port=free_port()))
        with ThreadPoolExecutor(1) as thread:
            zero._server.send({"kind": "ready", "generation": 1})
            setup = GroupSetup(GlooBackend(), torch.device("cpu"), TIMEOUT)
            waiting = thread.submit(one.init_groups, generation, setup)
            wait_until(lambda: one._go == 1)
            vanish(zero)
            with pytest.raises(RankFailedError, match="rank 0 died"):
                waiting.result()
        one.drop_groups()
        assert one.following().members == (one.me,)
        one.leave()


def test_a_wrong_token_or_address_is_an_error() -> None:
    with running_server(RULES) as server:
        members = begun(server)
        wrong = settings.Job(host=server.job.host, port=server.job.port, token="of another job")
        with pytest.raises(ConfigError, match="is not this rank's job: it refuses this token"):
            ServedMembership(wrong, None, TIMEOUT)
        for member in members:
            member.leave()
    with pytest.raises(RankFailedError, match="LIGHTNING_SHARD_JOB"):
        ServedMembership(server.job, None, timedelta(seconds=0.5))


def test_a_server_that_is_lost_ends_the_wait_for_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_LINGER_SECONDS", 0.2)
    with running_server(RULES) as server:
        zero, one = begun(server)
        vanish(one)
        vanish(zero)
        wait_until(lambda: zero._end is not None)
        assert not zero.is_wanted
        with pytest.raises(RankFailedError, match="no rank can join or be replaced"):
            zero.following()


def test_a_member_that_has_left_prints_nothing_of_the_server_that_goes_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a busy machine the server was gone before the thread, which said that it had died."""
    with running_server(RULES) as server:
        members = begun(server)
        for member in members:
            member.leave()
            member.server_lost("died")
    assert "died" not in capsys.readouterr().err


def job_and_member(folder: str) -> tuple[settings.Job, ServedMembership]:
    """Take part in a job of three, whose rendezvous server rank 0 starts."""
    rank = int(os.environ["RANK"])
    token = Path(folder, "port")
    if rank == 0:
        rules = JobRules(initial_size=3, timeout_seconds=60.0)
        job = start_rendezvous_server(rules, "127.0.0.1", 0, TOKEN)
        token.with_suffix(".new").write_text(str(job.port))
        token.with_suffix(".new").rename(token)
    wait_until(token.exists)
    job = settings.Job(host="127.0.0.1", port=int(token.read_text()), token=TOKEN)
    return job, ServedMembership(job, rank, TIMEOUT)


def rounds(num_rounds: int, folder: str) -> tuple[list[int], list[int]]:
    """Lose a peer (who drops its groups without a word) so often; count descriptors and threads."""
    torch.set_num_threads(1)
    gc.freeze()  # what is imported need not be looked at in each round
    job, membership = job_and_member(folder)
    generation = membership.begin()
    assert generation is not None
    backend, cpu = GlooBackend(), torch.device("cpu")
    descriptors, threads, held = [], [], []
    for number in range(num_rounds):
        membership.init_groups(generation, GroupSetup(backend, cpu, TIMEOUT))
        collectives = backend.collectives(dist.group.WORLD)
        if generation.rank == number % 3:
            collectives.barrier()
            vanish(membership)  # the server takes it for dead; it comes back as a newcomer
            membership.drop_groups()
            membership.leave()  # closes what its thread has left open
            membership = ServedMembership(job, None, TIMEOUT)
            generation = membership.following()
        else:
            generation = survive(membership, collectives, held)
        del collectives
        gc.collect()  # errors and their tracebacks refer to each other
        descriptors.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    membership.leave()
    return descriptors, threads


def add_up(collectives: Any) -> None:
    collectives.barrier()  # in which a peer may vanish already, once it is through itself
    while True:
        collectives.all_reduce(torch.ones(10_000), "sum").wait()


def survive(
    membership: ServedMembership, collectives: Any, held: list[BaseException]
) -> Generation:
    """Notice the loss, and go on until the lost one is back."""
    with pytest.raises(RankFailedError) as caught:
        add_up(collectives)
    held[:] = [caught.value]  # its traceback refers to the groups
    membership.drop_groups()
    generation = membership.following()
    if generation.size == 2:
        wait_until(lambda: membership.is_wanted)
        generation = membership.following()
    return generation


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_groups_that_are_dropped_leave_nothing_behind(tmp_path: Path) -> None:
    results = run_processes(rounds, 3, timeout_seconds=200, num_rounds=12, folder=str(tmp_path))
    for descriptors, threads in results:
        # A generation's rank 0 holds more: by the half each process has been one.
        assert max(descriptors[6:]) <= max(descriptors[:6])
        assert max(threads[6:]) <= max(threads[:6])


def test_signals_are_not_written_to_the_pipe_of_a_member_that_has_left() -> None:
    with running_server(RULES) as server:
        members = begun(server)
        try:
            members[0].watch_signals()
            for member in members:
                member.leave()
            assert signal.set_wakeup_fd(-1) == -1
            members[0].end_run()
        finally:
            signal.set_wakeup_fd(-1)


@pytest.mark.slow
def test_signals_have_somewhere_to_go_when_the_server_is_lost() -> None:
    with running_server(RULES) as server:
        zero, one = begun(server)
        signals = zero._thread.signal_fd
        vanish(one)
        vanish(zero)
        wait_until(lambda: zero._end is not None)
        os.fstat(signals)  # whoever opens a file next must not get this number
        assert zero._thread.signal_fd == signals
        zero.leave()
        one.leave()


def test_a_member_that_has_failed_ends_its_thread_before_its_pipe() -> None:
    """It does not say that it leaves. At exit what it read from was closed under its hands."""
    with running_server(RULES) as server:
        zero, one = begun(server)
        ask = interruption._threads[zero._thread]
        ask()
        zero._thread.join(patient(10))
        assert not zero._thread.is_alive()
        assert one.following().reason == f"rank 0 (member {zero.me}) died"
        zero.leave()
        one.leave()


def go_on_without_the_one_that_died(folder: str) -> float:
    """Lose a peer that has its lifeline already while the others wait for it in Gloo."""
    torch.set_num_threads(1)
    (_, membership), backend, cpu = job_and_member(folder), GlooBackend(), torch.device("cpu")
    generation = membership.begin()
    assert generation is not None
    if generation.rank == 2:

        def die(*_: Any, **__: Any) -> None:
            assert liveness._kept is not None
            liveness._kept.kept._connection._stream.shutdown(2)
            vanish(membership)
            raise InterruptedError

        dist.init_process_group = die  # type: ignore[assignment]
        with pytest.raises(InterruptedError):
            membership.init_groups(generation, GroupSetup(backend, cpu, TIMEOUT))
        return 0.0
    with pytest.raises(RankFailedError):
        membership.init_groups(generation, GroupSetup(backend, cpu, TIMEOUT))
    membership.drop_groups()
    membership.init_groups(membership.following(), GroupSetup(backend, cpu, TIMEOUT))
    total = torch.ones(1)
    backend.collectives(dist.group.WORLD).all_reduce(total, "sum").wait()
    membership.drop_groups()
    membership.leave()
    return total.item()


@pytest.mark.slow
def test_a_death_while_groups_are_made_leaves_nobody_waiting_in_the_store(
    tmp_path: Path,
) -> None:
    """A death while groups were made left the others waiting in the store."""
    results = run_processes(go_on_without_the_one_that_died, 3, folder=str(tmp_path))
    assert results == [2.0, 2.0, 0.0]
