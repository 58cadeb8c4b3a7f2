"""Starting the default process group of real processes, which meet at a store.

    start of a job    rank 0's store (see `meet`): the group, then the lifeline
    later             a given store, which no rank's end takes along: the group; who gives it has
                      started the lifeline

Ranks that meet anew have just lost a peer, and may lose another, which the lifeline tells.

Where the ranks of a job meet: the server that a thread of rank 0 keeps, behind a door.

our launcher, srun, by hand    the server listens at MASTER_ADDR:MASTER_PORT
torchrun                       its agent's store is there, open to all: rank 0 says in it where
                               its server listens, which each rank has prove that it is
elastic                        a rendezvous server beside the ranks; see `lightning_shard.elastic`

torchrun's agents keep one store over all restarts (torch 2.11 to 2.13 at least), where a rank might
take an old round's addresses for this one's:

    rank r    set hello/r = a word, and its backend       until "meeting" holds that word: ack, wait
    rank 0    get every hello, set "meeting" to them and a name; when a hello is another: again
              all have acked this name: go
"""

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    init_default_group,
)
from lightning_shard.backends.authentication import addresses
from lightning_shard.backends.authentication.store import store_at
from lightning_shard.backends.authentication.token import JobAddress, find_token, remember
from lightning_shard.backends.liveness.interruption import end_at_exit
from lightning_shard.backends.liveness.job_server import serve, tell_address, told_address
from lightning_shard.backends.objects import guard_torch
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.core import settings
from lightning_shard.errors import ConfigError, RankFailedError

_PAUSE_SECONDS = 0.01
_MOST_LISTED = 16


class MissingRanksError(dist.DistStoreError):  # a peer's end, to whoever asks what an error is
    """Ranks did not come to the meeting; the message says which."""


def fresh_store(
    store: Store, backend: str, rank: int, world_size: int, patience: timedelta
) -> Store:
    """Wait for all ranks of this meeting, and return a part of the store that only they use.

    Raises:
        ConfigError: The ranks have different backends; on every rank, or all would wait.
    """
    desk = PrefixStore("lightning_shard/roll_call", store)
    word = f"{secrets.token_hex(8)} {backend}"
    deadline = monotonic() + patience.total_seconds()
    desk.set(f"hello/{rank}", word)
    desk.set_timeout(patience)
    meet = _call if rank == 0 else _answer
    try:
        name = meet(desk, rank, world_size, word, _waiter(deadline, patience))
    except dist.DistStoreError as error:
        raise _who_is_missing(desk, rank, world_size) from error
    return PrefixStore(f"lightning_shard/meeting/{name}", store)


def _call(desk: Store, rank: int, world_size: int, word: str, wait: Callable[[], None]) -> str:
    """Call the roll, as rank 0, until all ranks have answered; return the meeting's name."""
    told: list[str] = []
    name = ""
    acks: list[str] = []
    while not (acks and desk.check(acks)):
        words = [desk.get(f"hello/{other}").decode() for other in range(world_size)]
        if words != told:
            told, name = words, secrets.token_hex(8)
            acks = [f"ack/{name}/{other}" for other in range(world_size)]
            desk.set(acks[rank], "")
            desk.set("meeting", json.dumps([name, told]))
        else:
            wait()
    _check_same_backend(told, rank)
    desk.set(f"go/{name}", "")
    return name


def _answer(desk: Store, rank: int, world_size: int, word: str, wait: Callable[[], None]) -> str:
    """Answer rank 0's roll call, as every other rank; return the meeting's name."""
    while True:
        name, words = json.loads(desk.get("meeting"))
        if len(words) == world_size and words[rank] == word:
            desk.set(f"ack/{name}/{rank}", "")
            _check_same_backend(words, rank)
            if desk.check([f"go/{name}"]):
                return str(name)
        wait()


def _check_same_backend(words: list[str], rank: int) -> None:
    backends = [word.partition(" ")[2] for word in words]
    other = next((one for one, told in enumerate(backends) if told != backends[0]), 0)
    if other:
        raise ConfigError(
            f"Rank {rank}: the ranks have different backends, expected the same on all: it is "
            f"{backends[0]} on rank 0 and {backends[other]} on rank {other}. Pass the same backend "
            "and debug to every rank's strategy, with devices of one kind, and set "
            "LIGHTNING_SHARD_DEBUG on all ranks or none."
        )


def _who_is_missing(desk: Store, rank: int, world_size: int) -> MissingRanksError:
    """Return the error that says which ranks have said hello at the store, and which have not."""
    missing = [other for other in range(world_size) if not desk.check([f"hello/{other}"])]
    come = [other for other in range(world_size) if other not in missing]
    if not missing:
        return MissingRanksError(
            f"All {world_size} ranks have come, and yet do not agree that they have: one may have "
            f"ended meanwhile, or two may have the same rank. See how each has ended."
        )
    return MissingRanksError(
        f"{len(come)} of {world_size} ranks have come: {_listed(come)}. Not yet: "
        f"{_listed(missing)}. See whether these were started, have ended with an error of their "
        f"own, or still load; a longer timeout waits for them."
    )


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_LISTED]))
    return f"{shown} and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else shown


def _waiter(deadline: float, patience: timedelta) -> Callable[[], None]:
    def wait() -> None:
        if monotonic() > deadline:
            raise dist.DistStoreError(f"timed out after {patience}: not every rank has come")
        time.sleep(_PAUSE_SECONDS)

    return wait


_OPEN_KEY = "lightning_shard/open_store"
_LONGEST_TRY = timedelta(seconds=10)


def meet(backend: str, rank: int, world_size: int, patience: timedelta) -> tuple[Store, JobAddress]:
    """Meet the other ranks at the place that the environment tells of; every rank must call."""
    place = settings.rendezvous()
    on_one_host = settings.is_on_one_host()
    token = find_token(place.port, on_one_host=on_one_host, rank=rank)
    remember(token)
    if settings.has_agent_store():
        desk = fresh_store(_agent_store(rank, patience), backend, rank, world_size, patience)
        return _meet_by_agent(desk, place.host, token, rank, patience, on_one_host)
    host = addresses.loopback_of(place.host) if on_one_host else place.host
    address = JobAddress(host=host, port=place.port, token=token)
    if rank == 0:
        serve(address)
    try:
        found = store_at(address, patience)
    except dist.DistError as error:
        raise _no_rank_zero(error) from error
    return fresh_store(found, backend, rank, world_size, patience), address


def store_without_python(
    store: Store, host: str, rank: int, world_size: int, timeout: timedelta
) -> Store:
    """Return a store of torch's own, of which rank 0 says in the job's where it is.

    NCCL asks its store from threads of its own, even when no Python runs any more.
    """
    if rank == 0:
        listener, *others = addresses.listen(host, 0)
        for other in others:
            other.close()
        address, port = listener.getsockname()[:2]
        own = host if address in ("0.0.0.0", "::") else address
        made = TCPStore(
            own,
            port,
            world_size,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set(_OPEN_KEY, json.dumps([own, port]))
        return made
    told, port = json.loads(store.get(_OPEN_KEY))
    return TCPStore(told, port, world_size, False, timeout, wait_for_workers=False)


def _meet_by_agent(
    desk: Store, host: str, token: str, rank: int, patience: timedelta, on_one_host: bool
) -> tuple[Store, JobAddress]:
    if rank == 0:
        own = "127.0.0.1" if on_one_host else _own_address(host)
        address = serve(JobAddress(host=own, port=0, token=token))
        tell_address(desk, address)
        return store_at(address, patience), address
    return _find_server(desk, token, patience)


def _agent_store(rank: int, patience: timedelta) -> Store:
    # For one rank: torch's store would only count who comes, while the roll call knows who is
    # missing.
    try:
        found, _, _ = next(rendezvous("env://", rank, 1, timeout=patience))
    except RuntimeError as error:
        if not is_about_a_peer(error):
            raise
        raise _no_rank_zero(error) from error
    store: Store = found
    return store


def _find_server(desk: Store, token: str, patience: timedelta) -> tuple[Store, JobAddress]:
    """Connect with rank 0's server; what another has written over its address leads nowhere."""
    deadline = monotonic() + patience.total_seconds()
    while True:
        try:
            address = told_address(desk, token)
            return store_at(address, min(patience, _LONGEST_TRY)), address
        except (ValueError, TypeError, ConfigError, dist.DistNetworkError):
            if monotonic() > deadline:
                raise


def _own_address(host: str) -> str:
    """Return an address of this host by which the others, who reach `host`, reach it."""
    own = addresses.address_towards(host, 0)
    return host if settings.is_loopback(own) else own


def _no_rank_zero(error: RuntimeError) -> MissingRanksError:
    return MissingRanksError(
        "Rank 0, where the others meet, does not answer: see whether it runs, and whether this "
        f"host reaches its address and port. torch said: {error}"
    )


# Ranks do not start at the same time: one may import for long on a busy host. That is no silence.
SHORTEST_MEETING = timedelta(minutes=1)

LONGEST_CONNECTING = timedelta(seconds=10)
"""How long ranks that all run already, and are ready, wait for each other at a given store."""

_CHECK_SECONDS = 0.05


def join_world(
    backend: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    timeout: timedelta,
    store: Store | None = None,
) -> None:
    """Start the default process group, and the lifeline if no store is given; all must call."""

    def make_group(at: Store, host: str) -> None:
        if "nccl" in backend and world_size > 1:
            at = store_without_python(at, host, rank, world_size, timeout)
        init_default_group(
            backend,
            store=PrefixStore("default_pg", at),  # as c10d does with a store of its own
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device,
        )

    try:
        if store is None:
            _join_at_rank_zero(make_group, rank, world_size, timeout, backend)
        else:
            _join_at(store, make_group, timeout)
    except RuntimeError as error:
        if not is_about_a_peer(error):
            raise
        place = _describe_place(store, timeout)
        who = error if isinstance(error, MissingRanksError) else ""
        raise RankFailedError(
            f"Rank {rank} of {world_size} could not meet the others {place}. "
            f"{who or f'torch said: {error}'}"
        ) from error


def _describe_place(store: Store | None, timeout: timedelta) -> str:
    if store is not None:
        return f"of its generation within {min(timeout, LONGEST_CONNECTING)}"
    place = settings.rendezvous()
    return (
        f"at MASTER_ADDR={place.host}, MASTER_PORT={place.port} within "
        f"{max(timeout, SHORTEST_MEETING)}. Check that every rank was started, that the address is "
        "rank 0's and that the port is free there"
    )


def host_of_rank_zero(store: Store | None) -> str:
    """Return the name or address of the host of rank 0 of the ranks that meet at this store."""
    return settings.rendezvous().host if store is None else told_address(store, "").host


def is_on_one_host(store: Store | None) -> bool:
    """Whether the ranks that meet at this store reach each other over the loopback interface."""
    return settings.is_loopback(host_of_rank_zero(store)) if store else settings.is_on_one_host()


def _join_at_rank_zero(
    make_group: Callable[[Store, str], None],
    rank: int,
    world_size: int,
    timeout: timedelta,
    backend: str,
) -> None:
    if world_size == 1:  # nobody to meet
        settings.rendezvous()
        make_group(HashStore(), "")
        return
    guard_torch()
    store, address = meet(backend, rank, world_size, max(timeout, SHORTEST_MEETING))
    store.set_timeout(timeout)
    try:
        make_group(store, address.host)
    except RuntimeError as error:
        if settings.is_on_one_host() or not is_about_a_peer(error):
            raise
        own = addresses.address_towards(address.host, 0)
        raise RankFailedError(
            f"Rank {rank} of {world_size} met the others at {address.host}, port {address.port}, "
            f"but within {timeout} it could not connect with each of them: ranks listen at "
            f"{addresses.chosen_ports()} of their hosts, which a firewall may drop. Let these TCP "
            f"ports through between the hosts, from and to {own} here; or see whether another rank "
            f"has ended. torch said: {error}"
        ) from error
    liveness.start(address, rank=rank, world_size=world_size, timeout=timeout)


def _join_at(store: Store, make_group: Callable[[Store, str], None], timeout: timedelta) -> None:
    guard_torch()
    store.set_timeout(min(timeout, LONGEST_CONNECTING))
    host = host_of_rank_zero(store)
    unless_a_rank_fails(lambda: make_group(store, host), "making the process group")
    store.set_timeout(timeout)


def unless_a_rank_fails(connect: Callable[[], None], operation: str) -> None:
    """Connect with the other ranks; give up as soon as the lifeline knows that one has failed.

    A transport that waits for a connection heeds nothing but its time-out. So it waits on a thread
    of its own, which is left to that when it is given up.
    """
    lifeline = liveness.current()
    if lifeline is None:
        connect()
        return
    has_ended, errors = Event(), list[BaseException]()

    def run() -> None:
        try:
            connect()
        except BaseException as error:
            errors.append(error)
        finally:
            has_ended.set()

    thread = Thread(target=run, name="lightning-shard-connecting", daemon=True)
    end_at_exit(thread)
    thread.start()
    while not has_ended.wait(_CHECK_SECONDS):
        lifeline.check(operation)
    if errors:
        raise errors[0]
