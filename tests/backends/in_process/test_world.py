"""The store of a world, called through c10d's C++ `PrefixStore`."""

import torch.distributed as dist

from lightning_shard.backends.in_process.world import current_world
from lightning_shard.testing import run_ranks


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
