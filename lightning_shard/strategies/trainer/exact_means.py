"""Means of what steps log that are the same on any number of ranks: exact sums, rounded once.

    rank 0   micro-batches 0 1   logs  a b       on a step   fsum(a b c d) / 4
    rank 1   micro-batches 2 3   logs  c d       an epoch    fsum of all of them / their samples

Lightning keeps one sum for each rank, which depends on what that rank has had.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.agreement import met
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer._lightning import recording_values, take_step_value

Logged = tuple[float, float]  # a value and its number of samples


class ExactMeans:
    """Keeps an epoch's logged values of micro-batches that count, with the parts of a mean."""

    counts = True
    parts: Sequence[Logged] = ()

    def __init__(self) -> None:
        # by key, with the number of the step that each was logged in
        self._values: dict[str, list[tuple[int, Sequence[tuple[Tensor | float, float]]]]] = {}

    @contextmanager
    def inside(
        self, trainer: "pl.Trainer", ranks: Callable[[], Collectives], num_own: Callable[[], int]
    ) -> Iterator[None]:
        """Keep what is logged inside, and let what is logged on steps be means of all ranks."""

        def at_step(keys: Sequence[str]) -> None:
            own = {key: self.of(key, last=num_own()) for key in keys}
            of_all = met(own, ranks(), "a step's values")
            _check_same_keys(of_all)
            for key in keys:
                take_step_value(
                    trainer, key, mean_of([one for each in of_all for one in each[key]])
                )

        def note(key: str, value: Any, batch_size: int, *, is_first: bool) -> None:
            step = trainer.fit_loop.epoch_loop.batch_idx // num_own()
            self._note(key, value, batch_size, step, is_first=is_first)

        with recording_values(trainer, note, at_step):
            yield

    def _note(self, key: str, value: Any, batch_size: int, step: int, *, is_first: bool) -> None:
        if is_first:
            self._values[key] = []
        size = batch_size if self.counts else 0
        if isinstance(value, Tensor):
            one = [(value.detach().clone(), size)]
            self._values.setdefault(key, []).append((step, self.parts or one))

    def of(self, key: str, *, last: int = 0) -> list[Logged]:
        """Return what was logged under a key, or the last of it, with the numbers of samples."""
        noted = self._values.get(key, [])[-last:]
        if last:  # a hook may have logged less often than a micro-batch
            noted = [one for one in noted if one[0] == noted[-1][0]]
        return [(float(one), float(size)) for _, parts in noted for one, size in parts]


def _check_same_keys(of_all: Sequence[Mapping[str, Any]]) -> None:
    """Refuse values of a step that some ranks have logged in none of their micro-batches."""
    logged = set().union(*of_all)
    for rank, own in enumerate(of_all):
        if missing := sorted(logged - own.keys()):
            raise ConfigError(
                f"Rank {rank}: same_bits=True, but nothing was logged as {missing[0]!r} in a step "
                f"in which other ranks have logged it, expected it from each micro-batch. Log it "
                f"in all of them, without rank_zero_only."
            )


def mean_of(values: Sequence[Logged]) -> float:
    """Return the mean by the numbers of samples; every rank has the same, in whatever order."""
    samples = math.fsum(size for _, size in values)
    return math.fsum(value * size for value, size in values) / samples if samples else math.nan
