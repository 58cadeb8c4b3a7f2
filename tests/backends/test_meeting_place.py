"""Ranks meet at a store that an earlier meeting has left its keys in."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shard.backends._c10d import HashStore, PrefixStore
from lightning_shard.backends.rendezvous import MissingRanksError, fresh_store

PATIENCE = timedelta(seconds=20)


def meet(store: Any, world_size: int) -> list[Any]:
    """Have all ranks meet, each on a thread."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [
            pool.submit(fresh_store, store, "gloo", rank, world_size, PATIENCE)
            for rank in reversed(range(world_size))
        ]
        return [one.result() for one in reversed(ranks)]


def test_all_ranks_of_a_meeting_share_a_store_and_no_other_meeting_does() -> None:
    store = HashStore()
    for number, world_size in enumerate((3, 3, 2, 4, 1)):
        ranks = meet(store, world_size)
        ranks[0].set("whose", str(number))
        assert {one.get("whose") for one in ranks} == {str(number).encode()}


def test_torchruns_restarted_workers_have_addresses_of_their_own() -> None:
    """Torchrun's restarted workers took the addresses of those before."""
    store = HashStore()
    for one in meet(store, 2):
        one.set("address", "of a dead rank")
    assert not any(one.check(["address"]) for one in meet(store, 2))


def test_a_hello_of_an_earlier_round_is_not_taken_for_the_ranks_own() -> None:
    store = HashStore()
    desk = PrefixStore("lightning_shard/roll_call", store)
    desk.set("hello/1", "stale")
    desk.set("meeting", json.dumps(["old", ["stale", "stale"]]))
    desk.set("go/old", "")
    first, second = meet(store, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_rank_that_does_not_come_is_an_error() -> None:
    with pytest.raises(dist.DistError):
        fresh_store(HashStore(), "gloo", 0, 2, timedelta(seconds=0.1))


def test_who_has_not_come_in_time_is_said() -> None:
    """Who had not come in time was not said."""
    store, patience = HashStore(), timedelta(seconds=0.3)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(fresh_store, store, "gloo", rank, 4, patience) for rank in (0, 2)]
        errors = [one.exception() for one in ranks]
    for error in errors:
        assert isinstance(error, MissingRanksError)
        assert "2 of 4 ranks have come: 0, 2. Not yet: 1, 3." in str(error)
