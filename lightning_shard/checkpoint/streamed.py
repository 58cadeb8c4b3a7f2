"""A checkpoint whose tensors come while its file is written: a model and its optimizers.

    trainer.save_checkpoint
      state_dict, optimizer_state     tensors without elements, on torch's "meta" device
      callbacks, the data module      may look at shapes; to read an element is an error
      pickle                          first in the file: it has shapes and numbers, no elements
      elements                        rank 0 writes its own shards from where they lie, and those
                                      of other ranks as they arrive

So rank 0 holds a few megabytes above its share, and nothing is brought together before it is
written.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.arriving import ArrivingTensor, full_parameters
from lightning_shard.checkpoint.files.torch_archive import (
    ArchiveRecord,
    records_awaiting,
    untouched,
)
from lightning_shard.checkpoint.full import detached, without_elements
from lightning_shard.checkpoint.optimizer_state import FullOptimizerState
from lightning_shard.checkpoint.section import frozen_entries
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.inner_tensors import join_entries
from lightning_shard.errors import CheckpointError

Place = tuple[object, ...]  # of a tensor, the same on all ranks
Arriving = Iterator[tuple[Place, ArrivingTensor]]


class StreamedFile:
    """What one save writes; each rank must make one, with the same sources in the same order."""

    def __init__(self) -> None:
        self._awaited: dict[Place, Tensor] = {}  # without elements
        self._sources: list[Arriving] = []
        self._tensors: Arriving = chain.from_iterable(self._sources)  # also those added later

    def await_tensor(self, place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without elements for the checkpoint; of one place it is the same."""
        if place not in self._awaited:
            self._awaited[place] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._awaited[place]

    def add_source(self, tensors: Arriving) -> None:
        """Add tensors that come together in turn: each rank must run through them."""
        self._sources.append(tensors)

    def records(self, checkpoint: Mapping[str, Any]) -> Iterator[ArchiveRecord]:
        """Yield what is written of a checkpoint, in order, on rank 0; others call `finish`.

        Raises:
            CheckpointError: The elements of a tensor do not come, or others than were awaited.
        """
        awaited = dict[Place, ArchiveRecord]()
        are_awaited = any(one.numel() for one in self._awaited.values())
        for record, place in self._pickled(checkpoint):
            if place is not None:
                awaited[place] = record
            elif record.name == ".format_version" and are_awaited:  # 1 would be: they lie in order
                yield record._replace(content=b"0")
            else:
                yield record
        for place, tensor in self._tensors:
            if place in awaited:
                yield _filled(awaited.pop(place), tensor)
        if awaited:
            raise CheckpointError(
                f"Nothing was saved: nobody has the elements of {sorted(map(str, awaited))}, "
                f"expected those of {len(self._awaited)} tensors. Save between two steps."
            )

    def finish(self) -> None:
        """Bring together what is left, for the ranks that wait for it; each rank must call."""
        for _ in self._tensors:
            pass

    def _pickled(self, checkpoint: Mapping[str, Any]) -> list[tuple[ArchiveRecord, Place | None]]:
        """Return a checkpoint's records, and of those without elements their places."""
        with self.in_memory():
            return list(records_awaiting(checkpoint, self._awaited))

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Let awaited tensors lie in memory of the CPU that nobody touches."""
        memory = [untouched(one.shape, one.dtype) for one in self._awaited.values()]
        pairs = list(zip(self._awaited.values(), memory, strict=True))
        _swap(pairs)
        try:
            yield
        finally:
            _swap(pairs)


def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def _filled(record: ArchiveRecord, tensor: ArrivingTensor) -> ArchiveRecord:
    """Return a record with its elements, which come while it is written."""
    if tensor.num_bytes != record.num_bytes:
        raise CheckpointError(
            f"Nothing was saved: {record.name} has come as {tuple(tensor.shape)} of "
            f"{tensor.dtype}, expected {record.num_bytes} bytes. Save between two steps."
        )
    return record._replace(content=(part.cpu().numpy().data for part in tensor.parts))


class StreamedState:
    """What one save writes of a model and its optimizers; each rank must make one."""

    def __init__(
        self,
        engine: DataParallelEngine,
        file: StreamedFile,
        *,
        with_frozen: bool = True,
        number: int = 0,
    ) -> None:
        self._engine, self._file, self._with_frozen = engine, file, with_frozen
        self._number = number
        self._module: nn.Module | None = None
        self._stay: Collection[nn.Parameter] = ()
        self._optimizers: list[FullOptimizerState] = []
        file.add_source(self._bring_together())

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the full module's `state_dict`, its parameters without elements; see `full`."""
        self._module = module
        self._engine.adopt_assigned()  # what user code has replaced is the model's again
        places = {param: place for place, param in enumerate(self._engine.model.parameters())}
        state = module.state_dict(keep_vars=True)
        values = dict(state)
        for name, value in values.items():  # in place: torch's own mapping knows module versions
            if isinstance(value, nn.Parameter) and value in places:
                place, full = places[value], without_elements(value, self._engine)
                state[name] = self._file.await_tensor(
                    ("parameter", self._number, place), full.shape, full.dtype
                )
            else:
                state[name] = detached(value, self._engine)
        if not self._with_frozen:
            self._stay = frozen_entries(module, values)
        join_entries(module, state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full `state_dict` on rank 0, entries without elements; each rank must call."""
        full, number = FullOptimizerState(optimizer, self._engine), len(self._optimizers)
        self._optimizers.append(full)
        awaited = {
            place: self._file.await_tensor(("state", self._number, number, *place), shape, dtype)
            for place, (shape, dtype) in full.shapes.items()
        }
        with self._file.in_memory():  # what is made of several is on their device
            return full.with_tensors(awaited)

    def _bring_together(self) -> Arriving:
        """Bring every tensor together in turn; each rank must run through it."""
        if self._module is not None:
            places = {param: place for place, param in enumerate(self._engine.model.parameters())}
            for param, full in full_parameters(self._engine, without=self._stay):
                yield ("parameter", self._number, places[param]), full
        for number, optimizer in enumerate(self._optimizers):
            for place, full in optimizer.tensors():
                yield ("state", self._number, number, *place), full
