"""Flat buffers give their parameters back, one after the other, and know how they were cut.

before    parameters are views of the buffer, or shards
after     each parameter has full memory of its own, and the buffer none. Its layout says how
optimizers' states are cut, where those stay in shards
"""

import torch

from lightning_shard.data_parallel.blanks import blank
from lightning_shard.data_parallel.flat_memory import full_views
from lightning_shard.data_parallel.flat_parameters import FlatParameters


def give_back(flat: FlatParameters, *, keep: bool) -> None:
    """Give a buffer's parameters full memory of their own, and let go of its; each rank must call.

    Args:
        flat: The buffer whose memory is meant.
        keep: Whether this rank keeps the values; else it has NaNs without memory.
    """
    for param, value in zip(flat.params, flat.full_values(), strict=True):
        param.data = value.clone() if keep else blank((), value.dtype).expand(value.shape)
    full, shard = (torch.empty_like(one, device="meta") for one in (flat.full, flat.shard))
    flat.full, flat.shard, flat.host, flat.common = full, shard, None, None
    flat.full_views = full_views(full, flat.layout)
    flat.local_views = flat.master_views = flat.shard_views(shard)


def is_given_back(flat: FlatParameters) -> bool:
    """Whether a buffer has given its parameters back, and shows nothing any more."""
    return flat.full.is_meta
