"""Where the ranks of a job meet: the server that a thread of rank 0 keeps, behind a door.

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
from time import monotonic

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightning_shard.backends._c10d import PrefixStore, Store, TCPStore
from lightning_shard.backends.authentication.addresses import address_towards, listen, loopback_of
from lightning_shard.backends.authentication.store import store_at
from lightning_shard.backends.authentication.token import JobAddress, find_token, remember
from lightning_shard.backends.liveness.job_server import serve, tell_address, told_address
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.core import settings
from lightning_shard.errors import ConfigError

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
    word, deadline = (
        f"{secrets.token_hex(8)} {backend}",
        monotonic() + patience.total_seconds(),
    )
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
    host = loopback_of(place.host) if on_one_host else place.host
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
        listener, *others = listen(host, 0)
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
    own = address_towards(host, 0)
    return host if settings.is_loopback(own) else own


def _no_rank_zero(error: RuntimeError) -> MissingRanksError:
    return MissingRanksError(
        "Rank 0, where the others meet, does not answer: see whether it runs, and whether this "
        f"host reaches its address and port. torch said: {error}"
    )
