"""The order of an epoch's samples, the same on every rank that asks, whenever it joined.

Here a copy of the sampler draws, from random numbers that depend on the job's seed and the epoch
alone, so that no state is carried from one epoch to the next:

    user's sampler ──shallow copy, its generators seeded anew──> list of samples of epoch e
    global random numbers ──set aside, seeded, put back──────────┘
"""

import copy
import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from lightning_shard.core.modules import random_streams_kept
from lightning_shard.errors import ConfigError, LayoutError

_np_random: Any = np.random  # its stubs leave out `get_bit_generator`


@dataclass(frozen=True, kw_only=True)
class Position:
    """A boundary between two optimizer steps."""

    epoch: int
    samples: int = 0
    steps: int = 0


class EpochOrder(Sampler[Any]):
    """All samples of an epoch in order, and where in it training is taken up."""

    def __init__(self, source: Iterable[Any], seed: int = 0) -> None:
        self.source = source
        self.seed = seed
        self.start = Position(epoch=0)  # at which the present epoch is taken up
        self._drawn: Sequence[Any] | None = None
        self._length()

    @property
    def epoch(self) -> int:
        """The number of the present epoch."""
        return self.start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the present one stays where it was taken up. Lightning calls this."""
        if epoch != self.epoch:
            self.take_up(Position(epoch=epoch))
            return
        self._tell_source(epoch)

    def take_up(self, position: Position) -> None:
        """Go on from a position."""
        num_samples = len(self)
        if not 0 <= position.samples <= num_samples or position.steps < 0:
            raise LayoutError(
                f"Training is to go on after {position.samples} samples and {position.steps} steps "
                f"of epoch {position.epoch}, expected at most the {num_samples} samples that the "
                f"sampler has. Has the data set changed since?"
            )
        if position.epoch != self.epoch:
            self._drawn = None
        self.start = position
        self._tell_source(position.epoch)

    def indices(self) -> Sequence[Any]:
        """The present epoch's samples, drawn once."""
        if self._drawn is None:
            self._drawn = _compact(self._draw())
        return self._drawn

    def fingerprint(self) -> str:
        """A digest of the present epoch's order, to be compared over ranks."""
        return hashlib.blake2b(repr(self.indices()).encode(), digest_size=16).hexdigest()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices())

    def __len__(self) -> int:
        return self._length()

    def _length(self) -> int:
        full: Any = self.source
        if isinstance(full, DistributedSampler):
            full = full.dataset
        try:
            return len(full)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"Elastic training needs to know how many samples an epoch has, got a sampler of "
                f"type {type(self.source).__name__} without a length. Give it a __len__."
            ) from error

    def _tell_source(self, epoch: int) -> None:
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _draw(self) -> list[Any]:
        seeds = np.random.SeedSequence((self.seed, self.epoch))
        length = len(self)
        with _random_numbers_of(seeds):
            sampler = _seeded_copy(self.source, self.seed, self.epoch)
            drawn = list(islice(sampler, length + 1))  # it might never end
        if len(drawn) != length:
            got = "more" if len(drawn) > length else f"only {len(drawn)}"
            raise ConfigError(
                f"The sampler of type {type(self.source).__name__} says that an epoch has {length} "
                f"samples, but it yields {got}. Make its __len__ and its __iter__ agree."
            )
        return drawn


def _compact(drawn: list[Any]) -> Sequence[Any]:
    """Numbers in 8 bytes each, a fifth of a list's; anything else as it is."""
    if all(type(one) is int for one in drawn):
        try:
            return array("q", drawn)
        except OverflowError:
            return drawn
    return drawn


def _seeded_copy(source: Any, seed: int, epoch: int) -> Iterable[Any]:
    """Copy a sampler, and those inside it, with generators that know their seeds and epoch only."""
    if not hasattr(source, "__dict__"):
        return source  # type: ignore[no-any-return]  # a list: an order as it is
    copied = copy.copy(source)
    if isinstance(copied, DistributedSampler):
        num_samples = len(copied.dataset)  # type: ignore[arg-type]
        copied.num_replicas, copied.rank = 1, 0
        copied.num_samples = copied.total_size = num_samples
    for name, value in vars(source).items():
        if isinstance(value, Sampler):
            setattr(copied, name, _seeded_copy(value, seed, epoch))
        for kind, make in _GENERATORS.items():
            if isinstance(value, kind):
                setattr(copied, name, make(value, seed, epoch))
    if callable(getattr(copied, "set_epoch", None)):
        copied.set_epoch(epoch)
    return copied  # type: ignore[no-any-return]


def _torch_generator(old: torch.Generator, seed: int, epoch: int) -> torch.Generator:
    seeds = np.random.SeedSequence((seed, epoch, old.initial_seed() % 2**64))
    return torch.Generator(old.device).manual_seed(_word(seeds))


_GENERATORS: dict[type, Callable[[Any, int, int], Any]] = {
    torch.Generator: _torch_generator,
    random.Random: lambda _, *seeds: random.Random(_word(np.random.SeedSequence(seeds))),
    np.random.Generator: lambda _, *seeds: np.random.default_rng(seeds),
    np.random.RandomState: lambda _, *seeds: np.random.RandomState(np.random.MT19937(seeds)),
}


def _word(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0])


@contextmanager
def _random_numbers_of(seeds: np.random.SeedSequence) -> Iterator[None]:
    """Inside, the CPU's global random numbers begin at these seeds; outside, nothing was drawn."""
    word = _word(seeds)
    numpy_generator = _np_random.get_bit_generator()
    with random_streams_kept():
        random.seed(word)
        torch.default_generator.manual_seed(word)  # torch.manual_seed would seed the GPUs as well
        _np_random.set_bit_generator(np.random.MT19937(seeds))
        try:
            yield
        finally:
            _np_random.set_bit_generator(numpy_generator)
