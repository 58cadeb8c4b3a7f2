"""The same order on every rank, whatever it has drawn before, and no global number drawn."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_shard.elastic.epoch_order import EpochOrder, Position
from lightning_shard.errors import ConfigError, LayoutError

DATA = range(23)


class OfPython(Sampler[int]):
    """Draws from Python's and numpy's global numbers."""

    def __iter__(self) -> Iterator[int]:
        first = random.sample(DATA, len(DATA) // 2)
        rest = sorted(set(DATA) - set(first))
        return iter([*first, *np.random.permutation(rest).tolist()])

    def __len__(self) -> int:
        return len(DATA)


class OfItsOwn(Sampler[int]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.state = np.random.RandomState(1)

    def __iter__(self) -> Iterator[int]:
        order = self.numpy.permutation(self.state.permutation(len(DATA))).tolist()
        self.python.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return len(DATA)


class Around(Sampler[int]):
    """A sampler in a sampler, whose generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.inner = RandomSampler(DATA, generator=torch.Generator().manual_seed(3))

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


RANDOM: dict[str, Callable[[], Iterable[Any]]] = {
    "random": lambda: RandomSampler(DATA),
    "random with a generator": lambda: RandomSampler(DATA, generator=seeded()),
    "random with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=50),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 30),
    "weighted with a generator": lambda: WeightedRandomSampler([0.5] * 40, 30, generator=seeded()),
    "subset": lambda: SubsetRandomSampler([4, 8, 15, 16, 23, 42, 108, 9, 7, 1]),
    "distributed": lambda: DistributedSampler(DATA, 3, 1, seed=2),  # type: ignore[arg-type]
    "Python's and numpy's numbers": OfPython,
    "its own numbers": OfItsOwn,
    "a sampler in a sampler": Around,
}


@pytest.mark.parametrize("kind", RANDOM)
def test_one_that_joins_late_draws_the_same(kind: str) -> None:
    old = EpochOrder(RANDOM[kind](), seed=7)
    for epoch in range(3):
        old.set_epoch(epoch)
        old.indices()
        torch.rand(3), random.random(), np.random.rand()
    new = EpochOrder(RANDOM[kind](), seed=7)
    new.set_epoch(2)
    assert list(new) == list(old)
    assert new.fingerprint() == old.fingerprint()


@pytest.mark.parametrize("kind", RANDOM)
def test_epochs_have_orders_of_their_own(kind: str) -> None:
    order = EpochOrder(RANDOM[kind](), seed=7)
    drawn = []
    for epoch in range(4):
        order.set_epoch(epoch)
        drawn.append(list(order))
        assert len(order) == len(drawn[-1])
    assert all(one != other for one, other in itertools.combinations(drawn, 2))
    order.set_epoch(1)
    assert list(order) == drawn[1]


@pytest.mark.parametrize("kind", sorted(RANDOM.keys() - {"distributed"}))
def test_the_jobs_seed_counts(kind: str) -> None:
    assert list(EpochOrder(RANDOM[kind](), seed=1)) != list(EpochOrder(RANDOM[kind](), seed=2))


def test_a_generators_own_seed_counts() -> None:
    drawn = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(seed, generator=generator)  # what was drawn from it since does not
        drawn.append(list(EpochOrder(RandomSampler(DATA, generator=generator))))
    fresh = RandomSampler(DATA, generator=torch.Generator().manual_seed(1))
    assert drawn[0] != drawn[1]
    assert list(EpochOrder(fresh)) == drawn[0]


@pytest.mark.parametrize("kind", RANDOM)
def test_no_number_is_drawn_from_the_users_streams(kind: str) -> None:
    def numbers() -> tuple[float, ...]:
        own = [v for v in vars(sampler).values() if isinstance(v, torch.Generator)]
        numpy, python = np.random.randn(3).tolist(), random.random()  # odd: one normal is kept
        drawn = [torch.rand((), generator=one).item() for one in own]
        return (*numpy, python, torch.rand(()).item(), *drawn)

    seen = []
    for draws in (False, True):
        sampler = RANDOM[kind]()
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        before = numbers()
        if draws:
            EpochOrder(sampler).indices()
        seen.append((before, numbers()))
    assert seen[0] == seen[1]


def test_streams_are_put_back_when_a_sampler_fails() -> None:
    class Failing(OfPython):
        def __iter__(self) -> Iterator[int]:
            random.random(), np.random.rand(), torch.rand(())
            raise KeyError("from the sampler")

    expected = []
    for fails in (False, True):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        if fails:
            with pytest.raises(KeyError, match="from the sampler"):
                EpochOrder(Failing()).indices()
        expected.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert expected[0] == expected[1]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_of_a_distributed_sampler_the_whole_order_counts(epoch: int, shuffle: bool) -> None:
    def sampler(num_ranks: int, rank: int) -> DistributedSampler[Any]:
        return DistributedSampler(DATA, num_ranks, rank, shuffle, seed=4)  # type: ignore[arg-type]

    full = sampler(1, 0)
    full.set_epoch(epoch)
    order = EpochOrder(sampler(4, 2))
    order.set_epoch(epoch)
    assert list(order) == list(full)
    assert len(order) == len(DATA)
    assert len(sampler(4, 2)) == 6


@pytest.mark.parametrize(
    "source", [SequentialSampler(DATA), list(DATA), torch.arange(23).numpy()], ids=type
)
def test_orders_that_stand_stay(source: Iterable[Any]) -> None:
    order = EpochOrder(source)
    for epoch in range(2):
        order.set_epoch(epoch)
        assert list(order) == list(DATA)


def test_samples_may_be_anything() -> None:
    source = ["a", ("b", 1), 2**70, None]
    assert list(EpochOrder(source)) == source
    assert list(EpochOrder([2**70])) == [2**70]


def test_the_users_sampler_hears_of_the_epoch() -> None:
    class Told(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Told(DATA)
    order = EpochOrder(sampler)
    order.set_epoch(0)
    assert sampler.epoch == 0
    order.take_up(Position(epoch=4))
    assert sampler.epoch == 4


def test_set_epoch_keeps_the_position_of_its_epoch_only() -> None:
    order = EpochOrder(SequentialSampler(DATA))
    order.take_up(Position(epoch=2, samples=8, steps=2))
    order.set_epoch(2)
    assert order.start == Position(epoch=2, samples=8, steps=2)
    order.set_epoch(3)
    order.set_epoch(2)
    assert order.start == Position(epoch=2, samples=0, steps=0)


def test_a_position_after_the_end_is_an_error() -> None:
    order = EpochOrder(SequentialSampler(DATA))
    order.take_up(Position(epoch=0, samples=23, steps=6))
    with pytest.raises(
        LayoutError, match="after 24 samples and 6 steps of epoch 1, expected at mo"
    ):
        order.take_up(Position(epoch=1, samples=24, steps=6))


def test_a_sampler_without_a_length_is_an_error() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    with pytest.raises(ConfigError, match="type Endless without a length"):
        EpochOrder(Endless())


@pytest.mark.parametrize(("yields", "got"), [(22, "only 22"), (24, "more"), (None, "more")])
def test_a_length_that_does_not_hold_is_an_error(yields: int | None, got: str) -> None:
    class Wrong(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return itertools.count() if yields is None else iter(range(yields))

    order = EpochOrder(Wrong(DATA))
    with pytest.raises(ConfigError, match=f"has 23 samples, but it yields {got}"):
        order.indices()


def test_fingerprints_tell_orders_apart() -> None:
    one, other = (EpochOrder(RandomSampler(DATA), seed) for seed in (1, 2))
    assert one.fingerprint() != other.fingerprint()
