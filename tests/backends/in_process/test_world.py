"""The store of a world, called through c10d's C++ `PrefixStore`; what a world's calls cost."""

import torch
import torch.distributed as dist

from lightning_shard.backends.in_process.world import current_world
from lightning_shard.testing import run_ranks
from tests.call_counts import growing_too_fast
from tests.groups import all_ranks


def _store() -> dist.Store:
    world = current_world()
    assert world is not None
    return dist.PrefixStore("test", world.store)


def test_waits_let_the_others_run() -> None:
    def fn(rank: int) -> bytes:
        store = _store()
        if rank == 2:
            store.set("key", "value")
        if rank == 0:
            while not store.check(["key"]):
                pass
        store.wait(["key"])
        return bytes(store.get("key"))

    assert run_ranks(fn, 3) == [b"value"] * 3


def test_counters_and_keys() -> None:
    def fn(rank: int) -> None:
        store = _store()
        store.add("count", 2)
        dist.barrier()
        assert store.add("count", 0) == 4
        if rank == 0:
            assert store.compare_set("other", "", "new") == b"new"
            assert store.compare_set("other", "old", "newer") == b"new"
            assert store.compare_set("other", "new", "newer") == b"newer"
            store.append("other", "!")
            assert store.multi_get(["other"]) == [b"newer!"]
            store.multi_set(["a", "b"], ["1", "2"])
            assert store.delete_key("other")
            assert not store.delete_key("other")
            assert store.num_keys() >= 3
        dist.barrier()

    run_ranks(fn, 2)


def test_calls_of_collectives_grow_as_the_number_of_ranks_does() -> None:
    """Each call and each waking looked at all peers, and objects were copied by each to each."""

    def fn(rank: int) -> None:
        ranks = all_ranks()
        full, own = torch.zeros(2 * ranks.size), torch.ones(2)
        for _ in range(3):
            ranks.all_reduce(full, "avg").wait()
            ranks.reduce_scatter(own, full).wait()
            ranks.all_gather(full, own).wait()
            ranks.broadcast(full, 0).wait()
            sent = ranks.send(own, (rank + 1) % ranks.size, async_op=True)
            ranks.recv(torch.empty(2), (rank - 1) % ranks.size)
            sent.wait()
        ranks.all_gather_object(rank)

    grown = growing_too_fast(lambda size: run_ranks(fn, size), 4)
    reads = ("backends/objects.py", "backends/authentication/")  # every rank reads every object
    assert not [name for name in grown if not name.startswith(reads)]
