"""The first content of a flat buffer: rank 0's values on every rank, and each rank's shard of them.

the parameters exist     once per host        on every rank            under offload
shard                    a part of them       a part, or its own       on the host, or both
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.backends.common_buffer import CommonBuffer
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.flat_memory import FlatMemory
from lightning_shard.data_parallel.flat_views import full_views
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.offload.host_shard import HostShard
from lightning_shard.data_parallel.unrecorded import unrecorded
from lightning_shard.data_parallel.values_at_start import ValuesAtStart, put_values
from lightning_shard.layout.flat import FlatLayout


class FirstValues(NamedTuple):
    """The memory of one flat buffer.

    Attributes:
        full: The full parameters, shape (F,).
        shard: This rank's shard, shape (S,).
        host: The optimizer's shard in host memory; None without offload.
        common: What `full` is of, where the parameters exist once per host; else None.
    """

    full: Tensor
    shard: Tensor
    host: HostShard | None = None
    common: CommonBuffer | None = None


@unrecorded
def first_values(
    params: Sequence[nn.Parameter],
    layout: FlatLayout,
    groups: DataGroups,
    *,
    stage: int,
    compute_dtype: torch.dtype,
    shard_index: int,
    copier: HostCopier | None,
    keeps_shard: bool,
    start: ValuesAtStart | None,
) -> FirstValues:
    """Lay out rank 0's values on every rank; each rank must call.

    Args:
        params: The parameters of the buffer, in its order.
        layout: Where each of them lies.
        groups: The data-parallel ranks.
        stage: ZeRO stage, 0 to 3.
        compute_dtype: Format of the full parameters in forward and backward.
        shard_index: Number of this rank's shard.
        copier: Copies to host memory, under offload.
        keeps_shard: Whether the device keeps a shard beside that on the host.
        start: Knows the values of parameters on meta.
    """
    like, bounds = params[0], layout.shard_bounds(shard_index)  # it may have no elements
    memory, is_plain, reshards = FlatMemory(groups.shard), compute_dtype == like.dtype, stage == 3
    stays, device = not reshards and is_plain, like.device if start is None else start.device
    make = partial(memory.zeros, like) if stays else like.new_zeros
    staging = make(layout.full_numel, dtype=like.dtype, device=device)
    if groups.dp.rank == 0:  # the others' are not read
        put_values(params, full_views(staging, layout), start)
    groups.dp.broadcast(staging, src=0).wait()
    part = slice(*bounds)
    own = staging[part]
    if stage > 0 and is_plain and copier is None:
        common = groups.shard.share(staging, *bounds)
        if common is not None:
            return FirstValues(common.tensor, common.tensor[part], common=common)
    full = staging.to(compute_dtype) if stays or reshards else memory.copy(staging, compute_dtype)
    if copier is None:
        return FirstValues(full, own if stays else memory.copy(own))
    host = HostShard(own, copier)
    if not keeps_shard:
        return FirstValues(full, host.tensor, host)
    shard = own.clone() if reshards else full[part]
    host.know(shard)
    return FirstValues(full, shard, host)
