"""Starting the default process group of real processes, which meet at a store.

    start of a job    rank 0's store (`meeting_place`): the group, then the lifeline
    later             a given store, which no rank's end takes along: the group; who gives it has
                      started the lifeline

Ranks that meet anew have just lost a peer, and may lose another, which the lifeline tells.
"""

from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread

import torch

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import HashStore, PrefixStore, Store, init_default_group
from lightning_shard.backends.authentication.addresses import address_towards, chosen_ports
from lightning_shard.backends.liveness.interruption import end_at_exit
from lightning_shard.backends.liveness.job_server import told_address
from lightning_shard.backends.meeting_place import MissingRanksError, meet, store_without_python
from lightning_shard.backends.objects import guard_torch
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.core import settings
from lightning_shard.errors import RankFailedError

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
        raise RankFailedError(
            f"Rank {rank} of {world_size} met the others at {address.host}, port {address.port}, "
            f"but within {timeout} it could not connect with each of them: ranks listen at "
            f"{chosen_ports()} of their hosts, which a firewall may drop. Let these TCP ports "
            f"through between the hosts, from and to {address_towards(address.host, 0)} here; or "
            f"see whether another rank has ended. torch said: {error}"
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
