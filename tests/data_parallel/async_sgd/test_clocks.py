"""Who may go on, by tables and by simulated worlds in which messages take their time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.data_parallel.async_sgd.clocks import Clocks


def clocks_of(step: int, included: list[list[int]], bound: int = 2) -> Clocks:
    """Rank 0's."""
    clocks = Clocks(0, len(included), bound)
    clocks.step, clocks.included = step, included
    clocks.arrived = list(clocks.own)
    return clocks


@pytest.mark.parametrize(
    ("step", "included", "staleness", "may_start"),
    [
        (0, [[0, 0], [0, 0]], 0, True),
        (2, [[2, 0], [0, 0]], 2, True),
        (3, [[3, 0], [3, 3]], 3, False),  # the own shard lacks a peer's steps
        (3, [[3, 3], [0, 3]], 3, False),  # the peer's lacks the own ones
        (3, [[3, 1], [2, 1]], 2, True),
        (3, [[3, 5], [3, 6]], 0, True),  # who is behind never waits
    ],
)
def test_the_oldest_part_of_the_parameters_decides(
    step: int, included: list[list[int]], staleness: int, may_start: bool
) -> None:
    clocks = clocks_of(step, included)
    assert (clocks.staleness, clocks.may_start) == (staleness, may_start)


def test_the_age_counts_updates_of_all_ranks() -> None:
    assert clocks_of(3, [[3, 5, 1], [0] * 3, [0] * 3]).age([2, 3, 1]) == 3


def test_a_peer_waits_for_what_it_has_not_been_handed() -> None:
    clocks = clocks_of(0, [[1, 3], [0, 0]])
    assert clocks.waits(1)  # at step 3 it needs one step of all; it has none
    clocks.hand_over(1)
    assert not clocks.waits(1)
    clocks.arrive(1)
    assert not clocks.waits(1)  # it needs two, which are not there yet
    clocks.arrive(0)
    assert not clocks.waits(1)
    assert clocks.must_apply  # then they are
    clocks.apply(0)
    clocks.apply(1)
    assert clocks.waits(1)
    clocks.hand_over(1)
    assert not clocks.must_apply


def test_gradients_gather_until_they_let_the_own_rank_go_on() -> None:
    clocks = clocks_of(3, [[3, 0], [3, 3]])
    for rank in range(2):
        clocks.hand_over(rank)
    assert not clocks.must_apply
    clocks.arrive(1)
    assert clocks.must_apply


class SimulatedRank:
    """A rank in a world of messages that arrive when a seed says so."""

    def __init__(self, rank: int, world: "SimulatedWorld") -> None:
        self.rank, self.world = rank, world
        self.clocks = Clocks(rank, world.size, world.bound)
        self.is_waiting = False

    def push(self, peer: int) -> None:
        self.world.post(self.rank, peer, list(self.clocks.own))
        self.clocks.hand_over(peer)

    def peers(self) -> list[int]:
        return [rank for rank in range(self.world.size) if rank != self.rank]

    def serve(self) -> None:
        for peer in self.peers():
            for version in self.world.take(peer, self.rank):
                if version is None:
                    self.clocks.arrive(peer)
                else:
                    self.clocks.learn(peer, version)

    def apply(self) -> None:
        for rank in range(self.world.size):
            while self.clocks.own[rank] < self.clocks.arrived[rank]:
                self.clocks.apply(rank)

    def run(self) -> None:
        """Compute and end a step, or go on waiting."""
        clocks = self.clocks
        if not self.is_waiting:
            assert clocks.staleness <= self.world.bound
            for peer in self.peers():
                self.world.post(self.rank, peer, None)
            clocks.arrive(self.rank)
            self.serve()
            self.apply()
            clocks.step += 1
            for peer in self.peers():
                self.push(peer)
        else:
            self.serve()
            if clocks.must_apply:
                self.apply()
            for peer in filter(clocks.waits, self.peers()):
                self.push(peer)
        self.is_waiting = not clocks.may_start
        if not self.is_waiting:
            for peer in filter(clocks.lacks, self.peers()):
                self.push(peer)


class SimulatedWorld:
    def __init__(self, size: int, bound: int, seed: int) -> None:
        self.size, self.bound = size, bound
        self.random = random.Random(seed)
        self.ways: dict[tuple[int, int], list[list[int] | None]] = {}
        self.ranks = [SimulatedRank(rank, self) for rank in range(size)]

    def post(self, sender: int, receiver: int, version: list[int] | None) -> None:
        self.ways.setdefault((sender, receiver), []).append(version)

    def take(self, sender: int, receiver: int) -> list[list[int] | None]:
        """Let some of what is on its way arrive, in order."""
        way = self.ways.get((sender, receiver), [])
        count = self.random.randint(0, len(way))
        self.ways[sender, receiver] = way[count:]
        return way[:count]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    bound=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    stuck=st.booleans(),
)
def test_nobody_is_ever_too_far_ahead_nor_waits_for_ever(
    size: int, bound: int, seed: int, stuck: bool
) -> None:
    """Ranks run at random; the slowest may even stop between its steps, as in a long collective."""
    world = SimulatedWorld(size, bound, seed)
    for _ in range(200):
        world.random.choice(world.ranks).run()
    goal = max(rank.clocks.step for rank in world.ranks)
    stopped = [rank for rank in world.ranks if stuck and rank.clocks.step == goal]
    for _ in range(3000):
        behind = [rank for rank in world.ranks if rank.clocks.step < goal and rank not in stopped]
        if not behind:
            return
        world.random.choice(behind).run()
    pytest.fail(f"some rank waits for ever: {[rank.clocks.step for rank in world.ranks]}")
