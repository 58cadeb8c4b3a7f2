"""The beginning of each operation on c10d, and the work left once its data has arrived.

These default algorithms, c10d's own, suit NCCL and the groups of this package; a subclass of
`Collectives` replaces those that its backend does badly. Shapes and types have been checked.
"""

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.rank_order import (
    C10D_OPS,
    ReduceOpName,
    combine_in_rank_order,
    is_narrow,
)
from lightning_shard.errors import ConfigError

# torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor`: the old names warn from
# then on, and the new ones are unknown before.
if hasattr(dist, "reduce_scatter_single"):
    reduce_scatter_flat = dist.reduce_scatter_single
    all_gather_flat = dist.all_gather_single
else:
    reduce_scatter_flat = dist.reduce_scatter_tensor
    all_gather_flat = dist.all_gather_into_tensor


class C10dTransfers:
    """Begins the operations of one group, by c10d's own algorithms."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"Expected a process group that this rank belongs to, got {group!r}. "
                "dist.new_group returns no group to ranks outside it: make Collectives on members."
            )
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def _all_reduce_dtype(self, tensor: Tensor, op: ReduceOpName) -> torch.dtype:
        """Return the type in which an all-reduce travels."""
        return torch.float32 if op == "avg" and is_narrow(tensor.dtype) else tensor.dtype

    def _reduce_scatter_dtype(
        self, output: Tensor, source: Tensor, op: ReduceOpName
    ) -> torch.dtype:
        """Return the type in which a reduce-scatter travels."""
        widen = output.dtype != source.dtype or (op == "avg" and is_narrow(source.dtype))
        return torch.float32 if widen else source.dtype

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(source):
            return copy_unless_same(output, source)
        dtype = self._all_reduce_dtype(source, op)
        wire = source.to(dtype) if source.dtype != dtype else output
        copy_unless_same(wire, source)
        work = dist.all_reduce(wire, C10D_OPS[op], group=self.group, async_op=True)
        return StartedTransfer(works=[work], finish=partial(self._settle, output, wire, op))

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        dtype = self._reduce_scatter_dtype(output, source, op)
        wire = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        work = reduce_scatter_flat(
            wire, source.to(dtype), C10D_OPS[op], group=self.group, async_op=True
        )
        return StartedTransfer(works=[work], finish=partial(self._settle, output, wire, op))

    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        return StartedTransfer(
            works=[all_gather_flat(output, source, group=self.group, async_op=True)]
        )

    def _all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> StartedTransfer:
        if self.size == 1:
            return copy_unless_same(output, source)
        work = dist.all_to_all_single(
            output, source, output_splits, input_splits, group=self.group, async_op=True
        )
        return StartedTransfer(works=[work])

    def _reduce_slices(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOpName
    ) -> StartedTransfer:
        """Reduce slices of different sizes: each rank is sent the others' of its own."""
        slices = list(torch.split(source, sizes))
        addends = [torch.empty_like(slices[self.rank]) for _ in sizes]
        work = dist.all_to_all(addends, slices, group=self.group, async_op=True)

        def finish() -> None:
            if output.numel():
                combine_in_rank_order(addends, self.rank, op, output)

        return StartedTransfer(works=[work], finish=finish)

    def _gather_slices(self, output: Tensor, source: Tensor, sizes: list[int]) -> StartedTransfer:
        """Collect slices of different sizes."""
        slices, own = list(torch.split(output, sizes)), source.clone()  # it may be one of them
        work = dist.all_to_all(slices, [own] * self.size, group=self.group, async_op=True)
        return StartedTransfer(works=[work])

    def _broadcast(self, tensor: Tensor, src: int) -> StartedTransfer:
        if self._is_still(tensor):
            return StartedTransfer()
        work = dist.broadcast(tensor, group_src=src, group=self.group, async_op=True)
        return StartedTransfer(works=[work])

    def _send(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
        return StartedTransfer(works=[cast("dist.Work", work)])  # None only outside the group

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        work = dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)
        return StartedTransfer(works=[cast("dist.Work", work)])

    def _is_still(self, tensor: Tensor) -> bool:
        """Say whether nothing moves: one rank, or no elements on any rank."""
        return self.size == 1 or tensor.numel() == 0

    def _settle(self, output: Tensor, wire: Tensor, op: ReduceOpName) -> None:
        """Divide for an average and bring the result into the caller's type."""
        if op == "avg":
            wire.div_(self.size)
        if wire is not output:
            output.copy_(wire)


def copy_unless_same(output: Tensor, source: Tensor) -> StartedTransfer:
    """Copy on a group of one rank, unless both are the same memory."""
    if output.data_ptr() != source.data_ptr() or output.dtype != source.dtype:
        output.copy_(source)
    return StartedTransfer()
