"""A meeting of ranks at a store that may still hold keys of an earlier meeting.

    rank r    set hello/r = a word of its own             until "meeting" holds that word: ack, wait
    rank 0    get every hello, set "meeting" to them and a name; when a hello is another: again
              all have acked this name: go

torchrun's agents keep one store over all restarts of a job (torch 2.11 to 2.13 at least), and after
a change of its nodes nothing in a worker's environment tells the new round from the last one. A
rank that took an old round's addresses would wait for a peer that is long gone.
"""

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.backends._c10d import PrefixStore, Store

_PAUSE_SECONDS = 0.01
_MOST_LISTED = 16


class MissingRanksError(dist.DistStoreError):  # a peer's end, to whoever asks what an error is
    """Ranks did not come to the meeting; the message says which."""


def fresh_store(store: Store, rank: int, world_size: int, patience: timedelta) -> Store:
    """Wait for all ranks of this meeting, and return a part of the store that only they use.

    Args:
        store: Store at which the ranks meet; every rank must call.
        rank: Global rank of this process.
        world_size: Number of ranks.
        patience: How long to wait for the other ranks.

    Raises:
        MissingRanksError: A rank did not come; says which have, and which have not.
        torch.distributed.DistError: The store is gone.
    """
    desk = PrefixStore("lightning_shard/roll_call", store)
    word, deadline = secrets.token_hex(8), time.monotonic() + patience.total_seconds()
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
    desk.set(f"go/{name}", "")
    return name


def _answer(desk: Store, rank: int, world_size: int, word: str, wait: Callable[[], None]) -> str:
    """Answer rank 0's roll call, as every other rank; return the meeting's name."""
    while True:
        name, words = json.loads(desk.get("meeting"))
        if len(words) == world_size and words[rank] == word:
            desk.set(f"ack/{name}/{rank}", "")
            if desk.check([f"go/{name}"]):
                return str(name)
        wait()


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
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"timed out after {patience}: not every rank has come")
        time.sleep(_PAUSE_SECONDS)

    return wait
