"""Full parameters on the rank that writes them, which arrive one after the other."""

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.arriving import ArrivingTensor, SlicedTensor, arriving_in_runs
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ranks_of


def full_parameters(
    engine: DataParallelEngine, *, without: Container[nn.Parameter] = ()
) -> Iterator[tuple[nn.Parameter, ArrivingTensor]]:
    """Bring the model's parameters together on rank 0; each rank must run through it.

    Args:
        engine: The engine that holds the model.
        without: Parameters that stay as they are, the same on all ranks.

    Yields:
        Each parameter, on rank 0 with its full value in the optimizer's format, which is only good
        until the next one is asked for; nothing on other ranks.
    """
    engine.adopt_assigned()
    if not engine.groups.is_first_copy:
        return
    params = [param for param in engine.model.parameters() if param not in without]
    held = {param for flat in engine.flats for param in flat.params}
    _take_in_edits(engine)
    ranks = [ranks_of(param, engine.groups, engine.split) for param in params]
    slices = [
        _sliced(param, engine, own.shard) if param in held else None
        for param, own in zip(params, ranks, strict=True)
    ]
    having = [one.shard for one in ranks]
    arrived = arriving_in_runs(list(zip(having, slices, strict=True)), engine.device)
    for param, own, full in zip(params, ranks, arrived, strict=True):
        full = ArrivingTensor.here(param.data) if full is None else full
        if own.dp.rank == 0:
            full = of_split(param, full, engine)
        if engine.is_first:
            yield param, full


def _take_in_edits(engine: DataParallelEngine) -> None:
    for flat in engine.flats:
        flat.see_assigned()
        if flat.is_unsharded:
            flat.take_in_edits()
        flat.settle()


def _sliced(param: nn.Parameter, engine: DataParallelEngine, ranks: Collectives) -> SlicedTensor:
    flat, index = engine.owner(param)
    if flat.reshards or flat.full.dtype != flat.master_dtype:
        return slices_of(flat, index, flat.master_views[index], flat.master_dtype, ranks)
    full = flat.full_views[index]  # here anyway
    numels = [full.numel(), *[0] * (ranks.size - 1)]
    return SlicedTensor(full.shape, full.dtype, numels, full if ranks.rank == 0 else None)


def slices_of(
    flat: FlatParameters, index: int, own: Tensor | None, dtype: torch.dtype, ranks: Collectives
) -> SlicedTensor:
    """Return a tensor that is cut as a parameter is.

    Args:
        flat: The buffer that holds the parameter.
        index: Index of the parameter there.
        own: What this rank has of the tensor; None where it has zeros, or nothing.
        dtype: Format of the tensor.
        ranks: The ranks that share the buffer.
    """
    slot, shards = flat.layout.slots[index], range(flat.layout.num_shards)
    numels = [flat.layout.shard_slice(slot, shard).numel for shard in shards]
    numels += [0] * (ranks.size - len(numels))  # one rank stands for all that have everything
    has_slice = own is not None and numels[ranks.rank] > 0
    return SlicedTensor(slot.shape, dtype, numels, own if has_slice else None)


def of_split(
    param: nn.Parameter, full: ArrivingTensor, engine: DataParallelEngine
) -> ArrivingTensor:
    """Return a full tensor from those of the ranks that split the model; each of them must call.

    Args:
        param: The parameter that is split as the tensor is, or one that was added in mid-run.
        full: What has arrived on this rank; as it is where the model is not split.
        engine: The engine that holds the parameter.
    """
    if not engine.split.groups or not engine.split.is_spread(param):
        return full
    return ArrivingTensor.here(engine.split.full(param, full.tensor()))
