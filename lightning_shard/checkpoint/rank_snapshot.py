"""One rank's shard of the training state at a step boundary, in one host buffer.

    | prefix | parameters of flat 0 | ... | exp_avg of flat 0 | ... | metadata |
      64 B     a tensor entry: one shard-sized tensor, at a multiple of 64 bytes     pickled

A flat buffer's slots lie at the same offsets whatever the number of ranks, so a tensor entry is a
range of elements that `elastic.recovery` cuts anew for any other number. The metadata says what the
tensor entries are and holds what is not per element: counters, the options of the groups, and the
caller's bytes (loops, RNG).
"""

import pickle
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.objects import CODE_BYTES, seal, unseal
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.optimizer_state import (
    elements_of,
    full_form,
    is_on_other_ranks,
    params_of,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_entries import flattened, joined, of_itself, tensors_of
from lightning_shard.data_parallel.units.unit import HERE
from lightning_shard.errors import CheckpointError

# An optimizer's state for each parameter, in a form from which another rank can rebuild it.
#
# optimizer.state[p] = {"step": tensor(7.), "exp_avg": shard, "exp_avg_sq": shard}
#                          │                    └─────┬─────┘
# entries of p         Scalar(7.0)                 ShardMark      the elements themselves travel
#                      the same on all ranks                      in a tensor entry
#
# Where it lies in blocks, a tensor entry has one element for so many of the parameter's, and one
# tensor made of several has its form among the values, as `flattened` gives it.
#
# Single numbers are kept as numbers: a model has hundreds of step counters, mostly equal ones.


class ShardMark(NamedTuple):
    """Marks a tensor that is cut where the parameter is, with one element for so many of its."""

    dtype: torch.dtype
    elements: int = 1


class Scalar(NamedTuple):
    """A tensor without dimensions as a Python number, which holds each of torch's exactly."""

    value: Any
    dtype: torch.dtype
    on_device: bool


class CommonValue(NamedTuple):
    """Any other value that is the same on all ranks, a tensor in host memory."""

    value: Any
    on_device: bool


Entry = ShardMark | Scalar | CommonValue
Entries = tuple[tuple[str, Entry], ...]  # in the optimizer's own order


def describe(optimizer: Optimizer, engine: DataParallelEngine) -> list[Entries | None]:
    """Describe an optimizer's state by parameter; None where this rank has none or a stale one."""
    scalars = _scalars(optimizer, engine)
    known: dict[object, Entries] = {}  # equal ones are one object: they are pickled once
    described: list[Entries | None] = []
    for param in params_of(optimizer):
        state, home = optimizer.state.get(param), engine.owner(param)
        if not state or is_on_other_ranks(*home):
            described.append(None)
            continue
        entries = tuple(
            (key, _entry(key, value, param, engine, scalars))
            for key, value in flattened(state).items()
        )
        described.append(known.setdefault(_likeness(entries), entries))
    return described


def merge(described: Sequence[Sequence[Entries | None]]) -> list[Entries | None]:
    """Merge the ranks' descriptions of one optimizer's state."""
    return [
        next((entries for entries in of_param if entries is not None), None)
        for of_param in zip(*described, strict=True)
    ]


def rebuild(entry: Scalar | CommonValue, param: nn.Parameter) -> Any:
    """Return the described value, on the device where it was."""
    if isinstance(entry, Scalar):
        device = param.device if entry.on_device else torch.device("cpu")
        return torch.tensor(entry.value, dtype=entry.dtype, device=device)
    if isinstance(entry.value, Tensor):
        return entry.value.to(param.device) if entry.on_device else entry.value.clone()
    return entry.value


def _scalars(optimizer: Optimizer, engine: DataParallelEngine) -> dict[int, Scalar]:
    """Return the numbers in 0-dim tensors by id, read in one copy for each device and format."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params_of(optimizer):
        if not is_on_other_ranks(*engine.owner(param)):
            for value in tensors_of(optimizer.state.get(param, {})):
                if value.ndim == 0:
                    alike[value.device, value.dtype].append(value)
    return {
        id(tensor): Scalar(value, dtype, device.type != "cpu")
        for (device, dtype), tensors in alike.items()
        for tensor, value in zip(tensors, torch.stack(tensors).tolist(), strict=True)
    }


def _entry(
    key: str,
    value: Any,
    param: nn.Parameter,
    engine: DataParallelEngine,
    scalars: Mapping[int, Scalar],
) -> Entry:
    if not isinstance(value, Tensor):
        return CommonValue(full_form(value, param, engine), on_device=False)
    if value.ndim == 0:
        return scalars[id(value)]
    if elements := elements_of(key, value, param, engine):
        return ShardMark(value.dtype, elements)
    return CommonValue(value.detach().to("cpu", copy=True), value.device.type != "cpu")


def _likeness(entries: Entries) -> object:
    """Return a key that is equal for equal entries: signs of zeros count, tensors compare by id."""
    zeros = []
    for _, entry in entries:
        if isinstance(entry, CommonValue):
            return id(entries)
        if isinstance(entry, Scalar) and not entry.value:
            zeros.append(str(entry.value))
    return (entries, *zeros) if zeros else entries


PARAMETERS = -1  # in the place of an optimizer's number
_ALIGN_BYTES = 64
_MAX_GAP_NUMEL = 64  # alignment leaves less
_PREFIX = struct.Struct("<8sQQ")  # magic, bytes in all, where the metadata begins
_MAGIC = b"LSsnap01"


class TensorKey(NamedTuple):
    """The key of a tensor entry, the same on all ranks; `optimizer` may be PARAMETERS."""

    flat: int
    optimizer: int
    name: str
    dtype: torch.dtype
    elements: int = 1

    @property
    def order(self) -> tuple[int, int, str, str, int]:
        """Sort key that orders tensor entries alike on all ranks."""
        return self.flat, self.optimizer, self.name, str(self.dtype), self.elements

    def zeros(self, flat: FlatParameters) -> tuple[Tensor, list[Tensor]]:
        """Return a blank entry of this rank's shard, and by parameter what it has of it: views."""
        entry = flat.shard.new_zeros(flat.shard.numel() // self.elements, dtype=self.dtype)
        if self.elements == 1:
            return entry, flat.shard_views(entry)
        return entry, [entry[own] for own in self.places(flat)]

    def places(self, flat: FlatParameters) -> list[slice]:
        """Return by parameter where its elements lie, which begin at borders of blocks."""
        parts = flat.layout.shard_slices(flat.shard_index)
        return [
            slice(one.shard_offset // self.elements, -(-one.shard_stop // self.elements))
            for one in parts
        ]


class TensorEntry(NamedTuple):
    """The place of a tensor entry in the buffer; `offset` is in bytes."""

    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class SnapshotMetadata:
    """The description of a snapshot's content.

    Attributes:
        generation: Generation of the members that took it; a later one's counts more.
        num_shards: Number of shards of the state; 1 where every rank holds everything.
        ends: For each flat buffer, the index one past the last parameter's last element.
    """

    generation: int
    step: int
    shard: int
    num_shards: int
    owner: str
    ends: tuple[int, ...]
    tensor_entries: dict[TensorKey, TensorEntry]
    states: tuple[list[Entries | None], ...]
    groups: tuple[list[dict[str, Any]], ...]
    extra: bytes
    own: tuple[dict[Any, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One shard of the state at one step; `data` is of shape (bytes,), uint8, in host memory."""

    data: Tensor
    metadata: SnapshotMetadata

    @classmethod
    def read(cls, data: Tensor, *, is_own: bool = False) -> "Snapshot":
        """Read a snapshot, whose metadata must bear the job's code unless it `is_own`."""
        prefix = data[: _PREFIX.size].numpy().tobytes()
        magic, num_bytes, begin = _PREFIX.unpack(prefix.ljust(_PREFIX.size, b"\0"))
        if magic != _MAGIC or not _PREFIX.size <= begin < num_bytes <= data.numel():
            raise CheckpointError(
                f"A buffer of {data.numel()} bytes is no whole snapshot: got {prefix[:8]!r} and "
                f"{num_bytes} bytes, expected {_MAGIC!r} and at most those. It was written by "
                f"another version, or its writer ended half-way; leave it out."
            )
        packed = data[begin:num_bytes].numpy().tobytes()
        packed = packed[CODE_BYTES:] if is_own else unseal(packed, "A snapshot")
        metadata = pickle.loads(packed)
        return cls(data=data[:num_bytes], metadata=metadata)

    def elements(self, key: TensorKey, start: int, stop: int) -> Tensor:
        """Return the bytes of the elements `start` to `stop` of a tensor entry: uint8, a view."""
        offset, size = self.metadata.tensor_entries[key].offset, key.dtype.itemsize
        return self.data[offset + start * size : offset + stop * size]


def take(
    engine: DataParallelEngine,
    optimizers: Sequence[Optimizer],
    *,
    step: int,
    extra: bytes = b"",
    generation: int = 0,
    owner: str = "",
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """Copy this rank's part of the state, at a step boundary without gradients; no messages."""
    states = tuple(describe(optimizer, engine) for optimizer in optimizers)
    sources = _sources(engine, optimizers, states)
    tensor_entries, end = _lay_out(sources, engine.flats)
    metadata = SnapshotMetadata(
        generation=generation,
        step=step,
        shard=engine.flats[0].shard_index,
        num_shards=engine.flats[0].layout.num_shards,
        owner=owner,
        ends=tuple(flat.layout.slots[-1].stop for flat in engine.flats),
        tensor_entries=tensor_entries,
        states=states,
        groups=tuple(_options(optimizer) for optimizer in optimizers),
        extra=extra,
        own=tuple(map(of_itself, optimizers)),
    )
    packed = seal(pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL))
    if buffers is None:
        buffers = HostBuffers(pinned=engine.device.type == "cuda")
    data = buffers.lend(end + len(packed))
    _copy(sources, tensor_entries, data, engine.flats)
    _write(data, end, packed)
    _write(data, 0, _PREFIX.pack(_MAGIC, end + len(packed), end))
    snapshot = Snapshot.read(data)  # the metadata above refers to what goes on changing
    buffers.keep(snapshot.data)
    return snapshot


# For each tensor entry the slices by the parameter's index in its flat buffer; None: the full
# shard of the buffer.
_Sources = dict[TensorKey, dict[int, Tensor] | None]


def _sources(
    engine: DataParallelEngine,
    optimizers: Sequence[Optimizer],
    states: Sequence[Sequence[Entries | None]],
) -> _Sources:
    engine.adopt_assigned()
    for unit in engine.units:
        for flat in unit.flats if unit.state in HERE else ():
            flat.take_in_edits()
    sources: _Sources = {
        TensorKey(flat=number, optimizer=PARAMETERS, name="", dtype=flat.shard.dtype): None
        for number, flat in enumerate(engine.flats)
    }
    numbers = {flat: number for number, flat in enumerate(engine.flats)}
    for number, (optimizer, described) in enumerate(zip(optimizers, states, strict=True)):
        for param, entries in zip(params_of(optimizer), described, strict=True):
            flat, index = engine.owner(param)
            kept = flattened(optimizer.state.get(param, {}))
            for name, entry in entries or ():
                if isinstance(entry, ShardMark):
                    key = TensorKey(numbers[flat], number, name, *entry)
                    shards = sources.setdefault(key, {})
                    assert shards is not None  # only parameters are copied as a whole
                    shards[index] = kept[name]
    return sources


def _lay_out(
    sources: _Sources, flats: Sequence[FlatParameters]
) -> tuple[dict[TensorKey, TensorEntry], int]:
    """Return the place of each tensor entry, and where the metadata begin."""
    tensor_entries, end = {}, _ALIGN_BYTES
    for key in sources:
        numel = flats[key.flat].shard.numel() // key.elements
        tensor_entries[key] = TensorEntry(offset=end, numel=numel)
        end += -(-numel * key.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    return tensor_entries, end


@torch.no_grad()
def _copy(
    sources: _Sources,
    tensor_entries: dict[TensorKey, TensorEntry],
    data: Tensor,
    flats: Sequence[FlatParameters],
) -> None:
    for key, shards in sources.items():
        tensor_entry, flat = tensor_entries[key], flats[key.flat]
        stop = tensor_entry.offset + tensor_entry.numel * key.dtype.itemsize
        target = data[tensor_entry.offset : stop].view(key.dtype)
        if shards is None:
            target.copy_(flat.shard, non_blocking=True)
            continue
        if key.elements > 1:
            for index, own in enumerate(key.places(flat)):
                if index in shards:
                    target[own].copy_(shards[index], non_blocking=True)
            continue
        for start, run in _runs(shards, flat):
            _copy_run(target[start:], run)
    if flats[0].shard.is_cuda:
        torch.cuda.current_stream(flats[0].shard.device).synchronize()


def _runs(shards: dict[int, Tensor], flat: FlatParameters) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield runs of slices that lie one behind the other in the shard; gaps are filled."""
    # One copy for each of hundreds of small slices would take longer than a training step.
    base = int(flat.shard.storage_offset())
    start = end = 0
    run: list[Tensor] = []
    for index in sorted(shards):
        view = flat.local_views[index]
        offset, numel = int(view.storage_offset()) - base, view.numel()
        if not numel:
            continue
        if offset - end > _MAX_GAP_NUMEL or not run:
            if run:
                yield start, run
            start, run = offset, []
        elif offset > end:
            run.append(flat.shard.new_zeros(offset - end, dtype=shards[index].dtype))
        shard = shards[index]
        run.append(shard if shard.ndim == 1 else shard.reshape(-1))
        end = offset + numel
    if run:
        yield start, run


def _copy_run(target: Tensor, run: list[Tensor]) -> None:
    target = target[: sum(map(Tensor.numel, run))]
    if len(run) > 1 and run[0].device == target.device:
        torch.cat(run, out=target)
    else:  # from a device in one transfer
        target.copy_(torch.cat(run) if len(run) > 1 else run[0], non_blocking=True)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, with tensors (a learning rate, say) in host memory."""
    return [
        {
            key: value.detach().cpu() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _write(data: Tensor, offset: int, content: bytes) -> None:
    source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data[offset : offset + len(content)].copy_(source)


@torch.no_grad()
def load(snapshot: Snapshot, engine: DataParallelEngine, optimizers: Sequence[Optimizer]) -> None:
    """Bring engine and optimizers to the state of this rank's own snapshot; each rank must call."""
    check_fits(snapshot.metadata, engine, optimizers)
    _check_place(snapshot.metadata, engine)
    forget_state(optimizers)
    shards: dict[TensorKey, list[Tensor]] = {}
    for key, place in snapshot.metadata.tensor_entries.items():
        target = engine.flats[key.flat].shard
        if key.optimizer != PARAMETERS:
            target, shards[key] = key.zeros(engine.flats[key.flat])
        target.copy_(snapshot.elements(key, 0, place.numel).view(key.dtype))
    rebuild_optimizers(optimizers, [snapshot.metadata], engine, shards)
    engine.publish_shards()


def _check_place(saved: SnapshotMetadata, engine: DataParallelEngine) -> None:
    flats = engine.flats
    got = saved.shard, saved.num_shards
    expected = flats[0].shard_index, flats[0].layout.num_shards
    sizes = {key.flat: one.numel * key.elements for key, one in saved.tensor_entries.items()}
    is_alike = all(flats[number].shard.numel() == numel for number, numel in sizes.items())
    if got != expected or not is_alike:
        raise CheckpointError(
            f"Rank {engine.collectives.rank}: the snapshot of step {saved.step} is shard {got[0]} "
            f"of {got[1]} with {list(sizes.values())} elements in its flat buffers, expected "
            f"shard {expected[0]} of {expected[1]} with "
            f"{[flats[number].shard.numel() for number in sizes]}. Take the strategy, its options "
            f"and the number of ranks of the run that wrote it."
        )


def forget_state(optimizers: Sequence[Optimizer]) -> None:
    """Let go of the state of optimizers, which is rebuilt."""
    for optimizer in optimizers:
        for key in (*params_of(optimizer), *of_itself(optimizer)):
            optimizer.state.pop(key, None)


def check_fits(
    saved: SnapshotMetadata, engine: DataParallelEngine, optimizers: Sequence[Optimizer]
) -> None:
    """Raise if a snapshot is of another model or other optimizers."""
    ends = tuple(flat.layout.slots[-1].stop for flat in engine.flats)
    if saved.ends != ends:
        raise CheckpointError(
            f"Rank {engine.collectives.rank}: the snapshot of step {saved.step} is of a model with "
            f"flat buffers of {saved.ends} elements, this one has {ends}. All ranks need the same "
            f"model, units, bucket_mb and precision."
        )
    got = [[len(group["params"]) for group in one.param_groups] for one in optimizers]
    expected = [len(states) for states in saved.states]
    if [sum(sizes) for sizes in got] != expected or list(map(len, got)) != list(
        map(len, saved.groups)
    ):
        raise CheckpointError(
            f"Rank {engine.collectives.rank}: the snapshot of step {saved.step} is of optimizers "
            f"of {expected} parameters in {list(map(len, saved.groups))} groups, got groups of "
            f"{got}. Make configure_optimizers return the same on every rank; a group that is "
            f"added later must be there on new ranks, too."
        )


def rebuild_optimizers(
    optimizers: Sequence[Optimizer],
    all_metadata: Sequence[SnapshotMetadata],
    engine: DataParallelEngine,
    shards: Mapping[TensorKey, list[Tensor]],
) -> None:
    """Give optimizers the state and the groups' options, of snapshots of all shards in order."""
    numbers = {flat: number for number, flat in enumerate(engine.flats)}
    for number, optimizer in enumerate(optimizers):
        _rebuild(number, optimizer, all_metadata, engine, numbers, shards)


def _rebuild(
    number: int,
    optimizer: Optimizer,
    all_metadata: Sequence[SnapshotMetadata],
    engine: DataParallelEngine,
    numbers: Mapping[FlatParameters, int],
    shards: Mapping[TensorKey, list[Tensor]],
) -> None:
    if all_metadata[0].own:  # not in what an earlier version has recorded
        optimizer.state.update(deepcopy(all_metadata[0].own[number]))
    merged = merge([metadata.states[number] for metadata in all_metadata])
    for param, entries in zip(params_of(optimizer), merged, strict=True):
        flat, index = engine.owner(param)
        kept: dict[str, Any] = {}
        for name, entry in entries or ():
            if isinstance(entry, ShardMark):
                shard = shards[TensorKey(numbers[flat], number, name, *entry)][index]
                if flat.is_owned:  # full on this rank, in the shape that its optimizer needs
                    shard = shard.view(flat.layout.slots[index].shape)
                kept[name] = shard
            else:
                kept[name] = full_form(rebuild(entry, param), param, engine, back=True)
        if kept:
            optimizer.state[param].update(joined(kept))
    for group, saved in zip(optimizer.param_groups, all_metadata[0].groups[number], strict=True):
        for option, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group.get(option), Tensor):
                group[option].copy_(value)  # schedulers and compiled steps hold the tensor
            else:
                group[option] = deepcopy(value)
