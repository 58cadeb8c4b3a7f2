"""In-process ranks that add up in Gloo's order, so that a replay has the bits of real processes.

Gloo's all-reduce is a ring. A tensor is cut into as many parts as there are ranks, and the sum of
each part grows as it travels downwards:

    rank        0    1    2    3
    part 0    4th  3rd  2nd  1st      begins at the rank before it, and ends at its own
    part 1    1st  4th  3rd  2nd
    part 2    2nd  1st  4th  3rd
    part 3    3rd  2nd  1st  4th

Sums of more than two floating-point numbers depend on that. Halves are added up in their own
format. Reduce-scatter and small all-reduces are exchanges of this package's own, which add up in
rank order; they run over in-process ranks as they do over Gloo.

Source: `ring` in gloo/allreduce.cc; checked with torch 2.13,
`tests/backends/in_process/test_gloo_order.py` fails when it changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_shard.backends.calls import Call
from lightning_shard.backends.packing import pack, unpack
from lightning_shard.backends.rank_order import fold_of

_SEGMENT_BYTES = 1 << 20  # the most that Gloo sends at once
_like_gloo: list[bool] = [False]


@contextmanager
def like_gloo() -> Iterator[None]:
    """Let worlds that are made inside add up in Gloo's order."""
    _like_gloo.append(True)
    try:
        yield
    finally:
        _like_gloo.pop()


def is_like_gloo() -> bool:
    """Whether a world that is made now adds up in Gloo's order."""
    return _like_gloo[-1]


def all_reduce_in_ring(calls: Sequence[Call]) -> None:
    """Reduce the tensors of all ranks' calls in place, in the order of Gloo's ring."""
    parts = [pack(call.inputs).clone() for call in calls]
    total = reduce_in_ring(parts, calls[0].reduce_op)
    for call in calls:
        unpack(total, call.inputs)


def reduce_in_ring(tensors: Sequence[Tensor], op: object) -> Tensor:
    """Reduce one tensor of each rank in the order of Gloo's ring.

    Args:
        tensors: One flat tensor of each rank, in rank order, all of one size and dtype.
        op: The reduction, a `ReduceOp` of c10d.
    """
    size, fold, total = len(tensors), fold_of(op), torch.empty_like(tensors[0])
    step = _part_numel(total, size)
    for part in range(size):
        place = slice(part * step, (part + 1) * step)
        found = tensors[part - 1][place].clone()
        for before in range(2, size + 1):
            found = fold(found, tensors[(part - before) % size][place])
        total[place] = found
    return total


def _part_numel(tensor: Tensor, num_ranks: int) -> int:
    """Return the elements of a rank's part: whole segments, at least two of each rank."""
    item, num_bytes = tensor.itemsize, tensor.nbytes
    most = item * max(1, _SEGMENT_BYTES // item)
    segments = _rounded_up(max(-(-num_bytes // most), 2 * num_ranks), num_ranks)
    segment = _rounded_up(-(-num_bytes // segments), item)
    return max(1, segments // num_ranks * segment // item)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
