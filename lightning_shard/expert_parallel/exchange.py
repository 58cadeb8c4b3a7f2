"""Rows of tokens sent to the ranks of their experts, and results sent back.

    rank 0   rows by expert   e0 e0 e1 | e2 e3        the first E / W experts are rank 0's
    rank 1                    e0 e1 e1 | e3
             counts first, then the rows
    rank 0   received         e0 e0 e1, e0 e1 e1      those of rank 0, then those of rank 1
    rank 1                    e2 e3, e3

An expert's gradient is the sum over the ranks, and the engine needs the mean: gradients are divided
by the number of ranks W where they come to the experts, and multiplied by it where they leave them.
All tensors that go together are one operation of autograd. Which of two would come first in a
backward depends on what else a rank's graph has, and all ranks must exchange in one order.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.tensor_parallel.regions import scaled_crossing


class Routes:
    """How many rows go from rank to rank, of the rows that are sorted by expert.

    Args:
        counts: Number of this rank's rows for each of the E experts, int64, shape (E,) or (E, C)
            with other numbers that travel along.
        group: The W ranks that share the experts, each of which must make one; W divides E.
        peers_alike: Whether to take it that each rank has the same numbers, as in a dry run.

    Attributes:
        counts: The same numbers of every rank, for this rank's experts; shape (W, E / W[, C]).
        sent: Number of rows to each rank.
        received: Number of rows from each rank.
    """

    def __init__(self, counts: Tensor, group: Collectives, *, peers_alike: bool = False) -> None:
        self.group = group
        own = counts.reshape(group.size, -1)
        theirs = torch.empty_like(own)
        group.all_to_all(theirs.view(-1), own.contiguous().view(-1)).wait()
        if peers_alike:
            theirs = own[group.rank].expand_as(own)
        self.counts = theirs.reshape(group.size, counts.shape[0] // group.size, *counts.shape[1:])
        sent = counts.view(group.size, counts.shape[0] // group.size, -1)[..., 0].sum(1)
        both = torch.stack([sent, self.rows.sum(1)]).tolist()  # waits for the device once
        self.sent: list[int] = both[0]
        self.received: list[int] = both[1]

    @property
    def rows(self) -> Tensor:
        """Number of rows of every rank for this rank's experts, shape (W, E / W)."""
        return self.counts if self.counts.ndim == 2 else self.counts[..., 0]

    def to_experts(self, *tensors: Tensor) -> list[Tensor]:
        """Send rows (S, ...), sorted by expert, to the experts' ranks; each rank must call."""
        return self._exchange(self.sent, self.received, float(self.group.size), tensors)

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Send results, one for each row that was received, back to where the rows came from."""
        return self._exchange(self.received, self.sent, 1.0 / self.group.size, tensors)

    @untraced
    def _exchange(
        self, sent: list[int], received: list[int], factor: float, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        results = _ExchangeRows.apply(self.group, sent, received, factor, *tensors)  # type: ignore[no-untyped-call]
        return list(results)

    def sorted_by_expert(self, received: Tensor) -> list[Tensor]:
        """Return the rows of each of this rank's experts, those of rank 0 first."""
        parts = torch.split(received, [one for row in self.rows.tolist() for one in row])
        num_experts = self.rows.shape[1]
        return [torch.cat(parts[expert::num_experts]) for expert in range(num_experts)]

    def as_received(self, of_experts: Sequence[Tensor]) -> Tensor:
        """Return rows by expert, as `sorted_by_expert` gives them, in the order of their coming."""
        counts: list[list[int]] = self.rows.tolist()
        by_expert = [
            torch.split(one, [row[expert] for row in counts])
            for expert, one in enumerate(of_experts)
        ]
        return torch.cat([parts[rank] for rank in range(len(counts)) for parts in by_expert])

    def local_experts(self) -> Tensor:
        """Return for each received row which of this rank's experts it is for, shape (R,)."""
        num_ranks, num_experts = self.rows.shape
        numbers = torch.arange(num_experts, device=self.rows.device).repeat(num_ranks)
        return numbers.repeat_interleave(self.rows.reshape(-1), output_size=sum(self.received))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Collectives,
        sent: list[int],
        received: list[int],
        factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sent, ctx.received, ctx.factor = group, sent, received, factor
        return tuple(_exchanged(one, sent, received, group) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = _ExchangeRows.apply(ctx.group, ctx.received, ctx.sent, 1.0, *grads)  # type: ignore[no-untyped-call]
        grads = tuple(scaled_crossing(one, ctx.factor, ctx.group) for one in back)
        return None, None, None, None, *grads


def _exchanged(
    tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: Collectives
) -> Tensor:
    width = tensor.shape[1:].numel()
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    group.all_to_all(
        result.view(-1),
        tensor.contiguous().view(-1),
        output_split_sizes=[num * width for num in received],
        input_split_sizes=[num * width for num in sent],
    ).wait()
    return result


def told(values: Iterable[Any]) -> str:
    """Name tensors by their shapes, and other values by their classes, for an error message."""
    return ", ".join(
        str(tuple(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in values
    )
