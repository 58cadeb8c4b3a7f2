"""A rank's snapshot back into its engine and optimizers.

    load           this rank's own shard, cut as the engine cuts it: no elements travel
    check_fits     whether the snapshot is of this model and these optimizers
    forget_state, rebuild_optimizers     optimizer state, of elements that somebody has brought

Where shards are cut anew for another number of ranks, `elastic.recovery` brings the elements.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import params_of
from lightning_shard.checkpoint.rank_snapshot import (
    PARAMETERS,
    Snapshot,
    SnapshotMetadata,
    TensorKey,
)
from lightning_shard.checkpoint.state_entries import ShardMark, merge, rebuild
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_entries import of_itself
from lightning_shard.errors import CheckpointError


@torch.no_grad()
def load(snapshot: Snapshot, engine: DataParallelEngine, optimizers: Sequence[Optimizer]) -> None:
    """Bring engine and optimizers to the state of this rank's own snapshot; each rank must call.

    Args:
        snapshot: What this rank has taken, under the same number of ranks.
        engine: The engine, with the stage, the units and the ranks of the snapshot's.
        optimizers: The optimizers on the engine, in the snapshot's order; their state is replaced.

    Raises:
        CheckpointError: The snapshot is of another rank, model or optimizers.
    """
    check_fits(snapshot.metadata, engine, optimizers)
    _check_place(snapshot.metadata, engine)
    forget_state(optimizers)
    shards: dict[TensorKey, list[Tensor]] = {}
    for key, place in snapshot.metadata.tensor_entries.items():
        flat = engine.flats[key.flat]
        target = flat.shard
        if key.optimizer != PARAMETERS:
            target = torch.zeros_like(flat.shard, dtype=key.dtype)
            shards[key] = flat.shard_views(target)
        target.copy_(snapshot.elements(key, 0, place.numel).view(key.dtype))
    rebuild_optimizers(optimizers, [snapshot.metadata], engine, shards)
    engine.publish_shards()


def _check_place(saved: SnapshotMetadata, engine: DataParallelEngine) -> None:
    flats = engine.flats
    got = saved.shard, saved.num_shards
    expected = flats[0].shard_index, flats[0].layout.num_shards
    sizes = {key.flat: one.numel for key, one in saved.tensor_entries.items()}
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
    """Raise if a snapshot is of another model or other optimizers.

    Raises:
        CheckpointError: Naming the sizes of both.
    """
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
    """Give optimizers the state and the options of their groups.

    Args:
        optimizers: The optimizers, in the snapshots' order.
        all_metadata: What is in the snapshots of the shards, in their order.
        engine: The engine that has the optimizers' parameters.
        shards: By tensor entry each parameter's shard of it.
    """
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
    """Give an optimizer its state and the options of its groups."""
    if all_metadata[0].own:  # not in what an earlier version has recorded
        optimizer.state.update(deepcopy(all_metadata[0].own[number]))
    merged = merge([metadata.states[number] for metadata in all_metadata])
    for param, entries in zip(params_of(optimizer), merged, strict=True):
        flat, index = engine.owner(param)
        for name, entry in entries or ():
            if isinstance(entry, ShardMark):
                key = TensorKey(flat=numbers[flat], optimizer=number, name=name, dtype=entry.dtype)
                shard = shards[key][index]
                if flat.is_owned:  # full on this rank, in the shape that its optimizer needs
                    shard = shard.view(flat.layout.slots[index].shape)
                optimizer.state[param][name] = shard
            else:
                optimizer.state[param][name] = rebuild(entry, param)
    for group, saved in zip(optimizer.param_groups, all_metadata[0].groups[number], strict=True):
        for option, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group.get(option), Tensor):
                group[option].copy_(value)  # schedulers and compiled steps hold the tensor
            else:
                group[option] = deepcopy(value)
