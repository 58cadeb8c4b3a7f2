"""The option `same_bits` in a loop of the user's: what it has of micro-batches.

for batch in loader:              a micro-batch begins, and its random numbers
loss = model(batch)           the first begins with rank 0's buffers, each with the step's
fabric.backward(loss / L)     ends it; the last of L sends what all have added up
optimizer.step()              ends the step, after L backwards on each rank
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.micro_batches import TRAINING, UPDATE, Dealing, begin_random_numbers


class StepsInOrder:
    """Counts the micro-batches of steps, and lets random numbers and buffers follow them.

    Attributes:
        num_steps: Steps that are done; a loop that goes on from a checkpoint sets it.
    """

    def __init__(
        self, ranks: Collectives, device: torch.device, *, stage: int, num_own: int
    ) -> None:
        self.num_steps = 0
        self._index, self._num_own, self._device = 0, num_own, device
        self._rank, self._notes_buffers = ranks.rank, True
        self._dealing = Dealing(
            rank=ranks.rank, num_ranks=ranks.size, num_own=num_own, stage=stage, error=self.error
        )
        neighbours = num_own if stage < 2 and ranks.size > 1 else 1
        if ranks.size & (ranks.size - 1) or neighbours & (neighbours - 1):
            raise self.error(
                f"{ranks.size} ranks have {num_own} micro-batches of a step each, expected 1, 2, "
                f"4, 8 ... ranks, and as many micro-batches under stages 0 and 1. Use another "
                f"number."
            )
        self.begin_micro_batch()

    def error(self, why: str) -> ConfigError:
        """Return the error that says why bits would depend on the ranks, and what to do."""
        return ConfigError(f"Rank {self._rank}: same_bits=True, but {why}")

    def check(self, module: nn.Module, precision: str, *, is_first: bool) -> None:
        """Refuse a module whose bits would depend on the ranks."""
        if not is_first:
            raise self.error(
                "a second module is set up, expected one, whose backwards count the micro-batches "
                "of a step. Set up one module that holds both."
            )
        if precision.startswith("16"):
            raise self.error(
                f"precision={precision!r} leaves out steps by what the ranks' own gradients are, "
                f"expected a format with fp32's range. Use 'bf16-mixed'."
            )
        if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
            raise self.error(
                "batch norms are synchronised over the ranks, expected each micro-batch's own "
                "statistics. Leave SyncBatchNorm out."
            )

    def begin_micro_batch(self) -> None:
        """Begin random numbers anew with what comes next: a micro-batch, or the step's update."""
        of = [UPDATE, self.num_steps]
        if self._index < self._num_own:
            of = [TRAINING, self.num_steps, self._dealing.place(self._index)]
        begin_random_numbers(*of, device=self._device)

    def before_forward(self, engine: DataParallelEngine) -> None:
        """Note with what buffers a step begins."""
        if self._notes_buffers and self._num_own > 1:
            engine.buffers.begin_micro_batch(is_first=True)
        self._notes_buffers = False

    @contextmanager
    def backward(self, engine: DataParallelEngine) -> Iterator[None]:
        """Run the backward of a micro-batch inside, which sends only with the last of a step."""
        index, is_last = self._index, self._index == self._num_own - 1
        if index == self._num_own or (is_last and not engine.reducer.synchronises):
            raise self.error(
                f"backward {index + 1} of a step begins, expected {self._num_own} before "
                f"optimizer.step(), the last of them outside of no_backward_sync. Pass "
                f"num_micro_batches to the strategy."
            )
        with nullcontext() if is_last else engine.no_sync():
            yield
        if self._num_own > 1:
            engine.buffers.end_micro_batch(is_first=index == 0, is_last=is_last)
        self._index += 1
        self.begin_micro_batch()

    def end_step(self) -> None:
        """Note that an optimizer has stepped, the first of the model's or another."""
        if self._index not in (0, self._num_own):
            raise self.error(
                f"an optimizer steps after {self._index} backwards, expected {self._num_own}. Pass "
                f"num_micro_batches={self._index} to the strategy, or make as many."
            )
        if self._index:
            self._index, self._notes_buffers = 0, True
            self.num_steps += 1
            self.begin_micro_batch()

    def dealt(self, loader: Any) -> Any:
        """Return a loader of this rank's micro-batches, unless each rank has all samples."""
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        if not is_stream and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
            return loader
        return DealtLoader(self._dealing.dealt(loader, is_training=True), self)


class DealtLoader:
    """A loader at whose batches micro-batches begin."""

    def __init__(self, loader: Any, steps: StepsInOrder) -> None:
        self.__dict__.update(vars(loader))
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._steps.begin_micro_batch()
            yield batch
