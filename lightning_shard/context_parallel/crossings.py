"""The communication of activations where the sequence is cut and where it is full again.

    cut        forward: the own slice       backward: all-gather / W
    gather     forward: all-gather          backward: W times the own slice
    share      forward: nothing             backward: all-reduce / W
    exchange   forward: all-to-all          backward: all-to-all
    total      forward: all-reduce          backward: W times the gradient

Outside of the cuts each of the W ranks computes the same, so its gradients are those of the loss.
Within, a rank computes from its slice only, and its gradients are W times its summand: the mean
over the ranks, which the engine takes, is the gradient of the loss in both places.

Source: DeepSpeed Ulysses, arXiv:2309.14509, for the all-to-all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.tensor_parallel.regions import (
    TwoWayExchange,
    copy_to_region,
    gather_copies,
    reduce_from_region,
    scale_gradient,
    split_to_region,
)


@dataclass(frozen=True)
class RankSubset:
    """The ranks of a group that exchange with this one, ascending; the others get nothing.

        group of 4, heads on 2, rings of 2     {0, 1} {2, 3} share heads     {0, 2} {1, 3} are rings

    Every rank of the group calls, in subsets of one size, so no group has to be made for it.
    """

    group: Collectives
    ranks: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks in the subset."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in the subset."""
        return self.ranks.index(self.group.rank)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Do `Collectives.all_to_all` among the ranks of the subset; sizes are one for each."""
        even = [input.numel() // self.size] * self.size
        return self.group.all_to_all(
            output,
            input,
            output_split_sizes=self._of_all(output_split_sizes or even),
            input_split_sizes=self._of_all(input_split_sizes or even),
            async_op=async_op,
        )

    def _of_all(self, sizes: Sequence[int]) -> list[int]:
        found = [0] * self.group.size
        for rank, size in zip(self.ranks, sizes, strict=True):
            found[rank] = size
        return found


def heads_and_ring(group: Collectives, num_sharing: int) -> tuple[RankSubset, RankSubset]:
    """Return the ranks with which this one shares heads, and those of its ring."""
    first = group.rank - group.rank % num_sharing
    sharing = range(first, first + num_sharing)
    ring = range(group.rank % num_sharing, group.size, num_sharing)
    return RankSubset(group, sharing), RankSubset(group, ring)


def cut_sequence(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return this rank's slice along `dim` of a tensor that is full and equal on each rank."""
    return split_to_region(scale_gradient(tensor, 1 / group.size, group), dim, group)


def gather_sequence(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return the ranks' slices together, with which each rank goes on alike."""
    return gather_copies(scale_gradient(tensor, float(group.size), group), dim, group)


def share_full(tensor: Tensor, group: Collectives) -> Tensor:
    """Return a full tensor for use with this rank's slices of others."""
    return copy_to_region(scale_gradient(tensor, 1 / group.size, group), group)


def total(tensor: Tensor, group: Collectives) -> Tensor:
    """Return the sum of what the ranks have of their slices, with which each goes on alike."""
    return reduce_from_region(scale_gradient(tensor, float(group.size), group), group)


def exchange(tensor: Tensor, cut: int, join: int, group: Collectives | RankSubset) -> Tensor:
    """Give each rank its part along one dimension of what the ranks have along another."""
    return exchange_together((tensor,), cut, join, group)[0]


@untraced
def exchange_together(
    tensors: Sequence[Tensor], cut: int, join: int, group: Collectives | RankSubset
) -> tuple[Tensor, ...]:
    """Exchange several tensors, a message for each format, and their gradients; see `exchange`."""
    if len({one.dtype for one in tensors}) > 1:
        return tuple(exchange(one, cut, join, group) for one in tensors)
    ways = [partial(_exchanged, *dims, group) for dims in ((cut, join), (join, cut))]
    result: tuple[Tensor, ...] = TwoWayExchange.apply(*ways, *tensors)  # type: ignore[no-untyped-call]
    return result


def _exchanged(
    cut: int, join: int, group: Collectives | RankSubset, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    shape = (group.size, -1)
    parts = [torch.unflatten(one, cut, shape).movedim(cut, 0) for one in tensors]  # (W, ...)
    widths = [one.numel() // group.size for one in tensors]
    sent = tensors[0].new_empty(group.size, sum(widths))
    received = torch.empty_like(sent)
    for own, place in zip(parts, sent.split_with_sizes(widths, 1), strict=True):
        place.view(own.shape).copy_(own)
    group.all_to_all(received.view(-1), sent.view(-1)).wait()
    places = zip(parts, received.split_with_sizes(widths, 1), strict=True)
    return tuple(torch.cat(place.view(own.shape).unbind(), dim=join) for own, place in places)
