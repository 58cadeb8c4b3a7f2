"""The micro-batches of steps whose bits do not depend on the ranks: their samples and numbers.

    step k of M micro-batches, numbers k M ... k M + M - 1, each always of the same samples

    stages 0, 1   rank r of N    k M + r L ... k M + r L + L - 1        L = M / N neighbours
    stages 2, 3                  k M + r, k M + r + N ...

Random numbers begin anew with each of them, from its number, and with each one's samples.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, get_worker_info
from typing_extensions import override

from lightning_shard.core import settings
from lightning_shard.elastic.elastic_sampler import replace_samplers
from lightning_shard.errors import ConfigError

TRAINING, EVALUATION, UPDATE, EPOCH_END, BATCH_START = range(5)
AFTER_BACKWARD, OPTIMIZER_STEP, EPOCH_START = range(5, 8)


class NumberedSamples(list[Any]):
    """The indices of a batch's samples, of which each micro-batch begins random numbers anew."""

    def __init__(self, indices: Sequence[Any], seeds: Sequence[int], dataset: Any = None) -> None:
        super().__init__(indices)
        self._seeds, self._dataset = seeds, dataset

    @override
    def __iter__(self) -> Iterator[Any]:
        size, worker = -(-len(self) // len(self._seeds)), get_worker_info()
        dataset = self._dataset if worker is None else worker.dataset
        for place in range(len(self)):
            if place % size == 0:
                _begin_reading(dataset, self._seeds[place // size])
            yield self[place]

    @override
    def __reduce__(self) -> Any:  # pickle would iterate, amid a step of this process
        return NumberedSamples, (self[:], self._seeds)


class DealtBatches:
    """This rank's batches of an epoch, of the samples of `in_each` micro-batches, by number."""

    def __init__(
        self,
        sampler: "DistributedSampler[Any]",
        size: int,
        numbers: Sequence[int],
        kind: int,
        in_each: int = 1,
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, size, False
        self._numbers, self._kind, self._in_each = numbers, kind, in_each

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[Any]]:
        given = self.sampler
        whole: DistributedSampler[Any] = DistributedSampler(
            given.dataset, num_replicas=1, rank=0, shuffle=given.shuffle, seed=given.seed
        )
        whole.set_epoch(given.epoch)
        order, size = list(whole), self.batch_size
        for number in self._numbers:
            parts = range(number * self._in_each, (number + 1) * self._in_each)
            seeds = [_seed_of(self._kind, given.epoch, part) for part in parts]
            _begin_reading(given.dataset, seeds[0])  # for what is read all at once
            samples = order[number * size : (number + 1) * size]
            yield NumberedSamples(samples, seeds, given.dataset)


def begin_random_numbers(*of: int, device: torch.device | None = None) -> None:
    """Let torch's, numpy's and Python's random numbers follow from the job's seed and these."""
    _begin_from(_seed_of(*of), device)


def _begin_reading(dataset: Any, seed: int) -> None:
    """Begin the generators of this process anew, and those that a data set and its parts keep."""
    _begin_from(seed)
    parts = [dataset]
    for part in parts:
        for one in getattr(part, "__dict__", {}).values():
            if isinstance(one, torch.Generator):
                one.manual_seed(seed)
            elif isinstance(one, random.Random | np.random.RandomState):
                one.seed(seed)
            elif isinstance(one, np.random.Generator):
                one.bit_generator.state = type(one.bit_generator)(seed).state
            else:
                held = one if isinstance(one, list | tuple) else [one]
                found = [each for each in held if isinstance(each, Dataset)]
                parts += [each for each in found if all(each is not known for known in parts)]


def _seed_of(*of: int) -> int:
    return int(np.random.SeedSequence((settings.global_seed(), *of)).generate_state(1)[0])


def _begin_from(seed: int, device: torch.device | None = None) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a stack for each device
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


_asking = Lock()
_before: list[tuple[bool, bool, bool]] = []  # as it was when the first of several runs has asked
_askers: list[Thread] = []  # of ranks, some of which may be lost before they leave


@contextmanager
def only_deterministic() -> Iterator[None]:
    """Let torch refuse, inside, each operation of which it has no deterministic form, by name."""
    of_memory: Any = torch.utils.deterministic
    me = current_thread()
    with _asking:
        _askers.append(me)
        if not _before:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            is_on = torch.are_deterministic_algorithms_enabled()
            _before.append((is_on, warns, of_memory.fill_uninitialized_memory))
            of_memory.fill_uninitialized_memory = is_on and _before[0][2]  # which takes long
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        with _asking:
            if me in _askers:
                _askers.remove(me)
            if _before and not any(one.is_alive() for one in _askers):
                _askers.clear()
                is_on, warns, fills = _before.pop()
                torch.use_deterministic_algorithms(is_on, warn_only=warns)
                of_memory.fill_uninitialized_memory = fills


def number_in_step(rank: int, num_ranks: int, index: int, *, num_own: int, stage: int) -> int:
    """Return the number within its step of the micro-batch that is so many-th on a rank."""
    return rank * num_own + index if stage < 2 else index * num_ranks + rank


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """Which micro-batches a rank has, and the error that says why bits would depend on ranks."""

    rank: int
    num_ranks: int
    num_own: int
    stage: int
    in_each: int = 1
    error: Callable[[str], ConfigError]

    def place(self, index: int) -> int:
        """Return the number within its step of the batch that is so many-th on this rank."""
        return number_in_step(
            self.rank, self.num_ranks, index, num_own=self.num_own, stage=self.stage
        )

    def dealt(self, loader: Any, *, is_training: bool) -> Any:
        """Return a loader of this rank's micro-batches, or of its batches of an evaluation."""
        sampler, batches = (getattr(loader, one, None) for one in ("sampler", "batch_sampler"))
        if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            given = sampler or getattr(loader, "dataset", loader)
            raise self.error(
                f"samples cannot be dealt by their numbers, got {type(given).__name__}, expected a "
                f"torch DataLoader with a batch_size, of a dataset with a length, and no sampler "
                f"of its own."
            )
        of_one: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        num_batches = len(BatchSampler(of_one, batches.batch_size, batches.drop_last))
        is_even = batches.drop_last or len(of_one) % batches.batch_size == 0
        numbers = self._numbers(num_batches, is_even, batches.drop_last, is_training=is_training)
        kind = TRAINING if is_training else EVALUATION
        loader = copy.copy(loader)
        dealt = DealtBatches(sampler, batches.batch_size, numbers, kind, self.in_each)
        replace_samplers(loader, sampler, dealt)
        return loader

    def _numbers(
        self, num_batches: int, is_even: bool, drop_last: bool, *, is_training: bool
    ) -> Sequence[int]:
        """Return the numbers of this rank's batches among those of an epoch."""
        ranks, rank = self.num_ranks, self.rank
        own = self.num_own if is_training else 1
        num_steps, rest = divmod(num_batches, own * ranks)
        if is_training and (rest or not is_even) and not drop_last:
            raise self.error(
                f"the last step of an epoch of {num_batches} batches would have fewer samples, "
                f"expected whole steps of {own * ranks} micro-batches. Pass "
                f"DataLoader(..., drop_last=True)."
            )
        if not is_training and rest:
            raise self.error(
                f"an evaluation has {num_batches} batches, some of which {ranks} ranks would have "
                f"twice, expected a multiple of the ranks. Pass DataLoader(..., batch_size=...)."
            )
        if not (is_training and self.stage < 2):
            return range(rank, num_steps * own * ranks, ranks)
        return [(k * ranks + rank) * own + j for k in range(num_steps) for j in range(own)]
