"""Each rank keeps a copy of another rank's snapshot."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.elastic.snapshot_memory import BuddyRing
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, start
from tests.groups import all_ranks, join
from tests.patience import patient
from tests.processes import run_processes

Names = list[tuple[int, int]]  # step and shard of what is held, the newest first


def names(held: list[Snapshot]) -> Names:
    return sorted(((one.metadata.step, one.metadata.shard) for one in held), reverse=True)


@pytest.mark.parametrize(
    ("size", "stride", "sources"),
    [
        (2, 1, [1, 0]),
        (4, 1, [3, 0, 1, 2]),
        (4, 2, [2, 3, 0, 1]),
        (4, 4, [3, 0, 1, 2]),  # one host after all
        (5, 2, [3, 4, 0, 1, 2]),
        (1, 1, [0]),
    ],
)
def test_who_keeps_whose(size: int, stride: int, sources: list[int]) -> None:
    rings = run_ranks(lambda _: BuddyRing(all_ranks(), stride), size)
    assert [ring.source for ring in rings if ring] == sources
    assert [sources[ring.target] for ring in rings if ring] == list(range(size))


def test_a_stride_of_none() -> None:
    with pytest.raises(ConfigError, match="got a stride of 0"):
        run_ranks(lambda _: BuddyRing(all_ranks(), 0), 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_copy_is_what_the_other_rank_took(stage: int) -> None:
    def fn(index: int) -> list[Snapshot]:
        rank = start(Setting(stage=stage))
        rank.train(0, 1)
        ring = BuddyRing(rank.collectives.duplicate())
        ring.begin(rank.snapshot(1, extra=bytes(100 * index), owner=str(index)))
        ring.finish()
        return sorted(ring.held, key=lambda one: one.metadata.owner != str(index))

    held = [one for one in run_ranks(fn, 3) if one]
    for rank, (own, copy) in enumerate(held):
        assert own.metadata.owner == str(rank)
        assert copy.metadata.owner == str((rank - 1) % 3)
        assert torch.equal(copy.data, held[(rank - 1) % 3][0].data)
        assert copy.metadata.extra == bytes(100 * ((rank - 1) % 3))


def test_all_hear_of_each_ranks_flags() -> None:
    def fn(index: int) -> int:
        rank = start(Setting(stage=1))
        return BuddyRing(rank.collectives.duplicate()).begin(rank.snapshot(0), 1 << index)

    assert run_ranks(fn, 3) == [0b111] * 3


@pytest.mark.parametrize(("stage", "size"), [(0, 3), (3, 1)])
def test_nothing_travels_where_nothing_needs_to(stage: int, size: int) -> None:
    def fn(_: int) -> tuple[int, Names]:
        rank = start(Setting(stage=stage))
        collectives = all_ranks()
        ring = BuddyRing(collectives)
        ring.begin(rank.snapshot(4))
        ring.finish()
        return collectives.traffic["buddy"].bytes, names(ring.held)

    assert run_ranks(fn, size) == [(0, [(4, 0)])] * size


def test_the_last_two_are_kept() -> None:
    def fn(_: int) -> list[Names]:
        rank = start(Setting(stage=2))
        ring = BuddyRing(rank.collectives.duplicate())
        seen = []
        for step in (10, 20, 30):
            ring.begin(rank.snapshot(step))
            seen.append(names(ring.held))
            ring.finish()
            seen.append(names(ring.held))
        return seen

    rank_0 = run_ranks(fn, 2)[0]
    assert rank_0 == [
        [(10, 0)],
        [(10, 1), (10, 0)],
        [(20, 0), (10, 1), (10, 0)],
        [(20, 1), (20, 0), (10, 1), (10, 0)],
        [(30, 0), (20, 1), (20, 0)],
        [(30, 1), (30, 0), (20, 1), (20, 0)],
    ]


def test_five_buffers_serve_for_good() -> None:
    def fn(_: int) -> set[int]:
        rank = start(Setting(stage=2))
        buffers = HostBuffers()
        ring = BuddyRing(rank.collectives.duplicate(), buffers=buffers)
        seen = set()
        for step in range(12):
            ring.begin(rank.snapshot(step, buffers=buffers))
            ring.finish()
            seen |= {one.data.data_ptr() for one in ring.held}
        return seen

    assert [len(seen or ()) for seen in run_ranks(fn, 2)] == [5, 5]


def test_what_was_held_before_goes_once_a_new_one_is_everywhere() -> None:
    def fn(_: int) -> list[Names]:
        rank = start(Setting(stage=2))
        ring = BuddyRing(rank.collectives.duplicate(), held=[rank.snapshot(5)])
        seen = [names(ring.held)]
        for step in (6, 7):
            ring.begin(rank.snapshot(step))
            ring.finish()
            seen.append([name for name in names(ring.held) if name[1] == 0])
        return seen

    assert run_ranks(fn, 2)[0] == [[(5, 0)], [(6, 0), (5, 0)], [(7, 0), (6, 0)]]


class LostInExchange(BuddyRing):
    """A rank that goes when all have met and nothing of it has been sent."""

    def _start(self, snapshot: Snapshot, num_bytes: int) -> None:
        raise ValueError("lost")


def finish_and_meet(ring: BuddyRing, collectives: Collectives) -> None:
    ring.finish()
    collectives.barrier()  # whoever has nothing to do with the lost rank notices here


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_in_an_exchange_leaves_the_older_one_everywhere(stage: int) -> None:
    held: dict[int, Names] = {}

    def fn(index: int) -> None:
        rank = start(Setting(stage=stage))
        duplicate = rank.collectives.duplicate()
        ring = BuddyRing(duplicate)
        ring.begin(rank.snapshot(10))
        ring.finish()
        if index == 2:
            with pytest.raises(ValueError, match="lost"):
                LostInExchange(duplicate, held=ring.held).begin(rank.snapshot(20))
            rank.collectives.barrier()
            raise ValueError("lost")
        ring.begin(rank.snapshot(20))
        rank.collectives.barrier()  # the others' messages are on their way
        with pytest.raises(RankFailedError):
            finish_and_meet(ring, rank.collectives)
        ring.salvage()
        held[index] = names(ring.held)

    with pytest.raises(ValueError, match="lost"):
        run_ranks(fn, 4)
    assert held == {
        0: [(20, 3), (20, 0), (10, 3), (10, 0)],
        1: [(20, 1), (20, 0), (10, 1), (10, 0)],
        3: [(20, 3), (10, 3), (10, 2)],
    }


# --- real processes ---------------------------------------------------------------------------


def join_with_engine() -> tuple[DataParallelEngine, Collectives]:
    collectives = join()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))  # more than sockets hold
    return DataParallelEngine(model, collectives, EngineOptions(stage=2)), collectives.duplicate()


def tell(folder: str, word: str) -> None:
    Path(folder, word).touch()


def await_words(folder: str, *words: str) -> None:
    deadline = time.monotonic() + patient(60)
    while not all(Path(folder, word).exists() for word in words):
        assert time.monotonic() < deadline, f"nobody said {words}"
        time.sleep(0.01)


def lose_rank_2(folder: str) -> Names:
    """Rank 2 goes while its peers depend on what it sends, and then for good."""
    engine, duplicate = join_with_engine()
    rank = duplicate.rank
    ring = BuddyRing(duplicate)
    ring.begin(take(engine, [], step=10))
    if rank == 2:
        await_words(folder, "0 has it", "1 has it")  # no call to c10d in between
        ring.finish()
        LostAtOnce(duplicate).begin(take(engine, [], step=20))
    ring.finish()
    tell(folder, f"{rank} has it")
    ring.begin(take(engine, [], step=20))
    with pytest.raises(RankFailedError):
        ring.finish()
    ring.salvage()
    tell(folder, f"{rank} has noticed")
    await_words(folder, "0 has noticed", "1 has noticed")
    return names(ring.held)


class LostAtOnce(BuddyRing):
    def _start(self, snapshot: Snapshot, num_bytes: int) -> None:
        os._exit(0)


@pytest.mark.slow
def test_gloo_exchanges_while_ranks_compute_and_notices_a_loss(tmp_path: Path) -> None:
    assert run_processes(lose_rank_2, 3, vanishing_ranks=[2], folder=str(tmp_path)) == [
        [(20, 0), (10, 2), (10, 0)],
        [(20, 1), (20, 0), (10, 1), (10, 0)],
        None,
    ]
