"""Joins shards that user code puts into a checkpoint itself, such as a teacher's weights.

    def on_save_checkpoint(self, checkpoint):
        checkpoint["teacher"] = self.teacher.state_dict()     # under stage 3: this rank's shards

A shard is recognised by its memory: an entry that lies where a parameter's shard lies, or that of a
copy made during the run. A rank has no elements of some parameters, so ranks tell each other which
entry is which. A cloned shard is not recognised.
"""

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView
from lightning_shard.errors import ConfigError

_Path = tuple[Any, ...]


def join_shards(checkpoint: dict[str, Any], engine: DataParallelEngine) -> None:
    """Put full tensors, on the CPU, in the place of shards; each rank must call.

    Args:
        checkpoint: Nested mappings and lists; changed in place on the rank that saves.
        engine: The engine of stage 3 whose shards these are.
    """
    read = {
        repr(path): (path, value)
        for path, value in _tensors(checkpoint, ())
        if isinstance(value, (ParameterShard, ShardView))
    }
    known = engine.numbered_shards()
    own = {
        path: known[place]
        for path, value in _tensors(checkpoint, ())
        if not isinstance(value, (ParameterShard, ShardView))
        and (place := (value.data_ptr(), value.numel())) in known
        and value.ndim == 1
    }
    told = engine.collectives.all_gather_object((sorted(read), own))
    _join_read(checkpoint, engine, read, [places for places, _ in told])
    found: dict[_Path, Any] = {}
    for _, theirs in told:
        found.update(theirs)
    for path, shard in found.items():
        full = engine.full_shard(shard)
        if engine.is_first:
            _put(checkpoint, path, full.to("cpu", copy=True))


def _join_read(
    checkpoint: dict[str, Any],
    engine: DataParallelEngine,
    own: Mapping[str, tuple[_Path, ParameterShard | ShardView]],
    every: Sequence[Sequence[str]],
) -> None:
    """Put full tensors in the place of tensors that were read from sharded parameters.

    Raises:
        ConfigError: Some ranks have no such tensor in that place.
    """
    for place in sorted(set[str]().union(*every)):
        lacking = [rank for rank, theirs in enumerate(every) if place not in theirs]
        if lacking:
            raise ConfigError(
                f"The checkpoint's entry {place} was read of a sharded parameter, and rank "
                f"{lacking[0]} has not put it there, expected every rank to do so: its elements "
                f"lie on all of them."
            )
        path, value = own[place]
        full = value.full_tensor()
        _put(checkpoint, path, full.cpu() if engine.is_first else full.flatten()[:0])


def _tensors(value: Any, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
    """Yield the path and value of each tensor with elements."""
    if isinstance(value, Tensor):
        if value.numel():
            yield path, value
    elif isinstance(value, MutableMapping):
        for key, child in value.items():
            yield from _tensors(child, (*path, key))
    elif isinstance(value, MutableSequence):
        for index, child in enumerate(value):
            yield from _tensors(child, (*path, index))


def _put(checkpoint: Any, path: _Path, full: Tensor) -> None:
    *outer, last = path
    for key in outer:
        checkpoint = checkpoint[key]
    checkpoint[last] = full
