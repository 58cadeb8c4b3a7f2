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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.data_parallel.torch_private import in_backward, untraced
from lightning_shard.expert_parallel.finding import Mixture
from lightning_shard.expert_parallel.load import Load
from lightning_shard.tensor_parallel.regions import TwoWayExchange, scale_gradient


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
        orders = (sent, received), (received, sent)
        ways = [partial(_exchanged, *order, self.group) for order in orders]
        scaled = [scale_gradient(one, factor, self.group) for one in tensors]
        return list(TwoWayExchange.apply(*ways, *scaled))  # type: ignore[no-untyped-call]

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


class ExpertCalls(SharedByCopies):
    """Calls of one module that has experts, which W ranks share.

    Args:
        mixture: The experts and their module.
        group: The W ranks that share them.
        is_dry: Whether tokens have no elements, and peers are taken to do what this rank does.

    Attributes:
        load: What the experts got.
        anchor: A leaf without elements of which each backward of an exchange has a gradient.
        is_own: Whether an expert's own forward runs, or that of a module with all experts.
    """

    def __init__(self, mixture: Mixture, group: Collectives, *, is_dry: bool = False) -> None:
        self.mixture, self._group, self._is_dry = mixture, group, is_dry
        self.load = Load()
        self.anchor = torch.zeros(0, 1, requires_grad=True)
        self.is_own = False
        self._num_here = mixture.num_experts // group.size

    def _routes(self, counts: Tensor) -> Routes:
        """Return how rows go, of which each expert gets so many; each rank must call."""
        return Routes(counts, self._group, peers_alike=self._is_dry)

    def _note(self, module: nn.Module, routes: Routes) -> None:
        """Count the rows of a call in training."""
        if module.training and torch.is_grad_enabled() and not in_backward():
            self.load.note(routes.sent, self._group.rank, routes.rows.sum(0))


def _exchanged(
    sent: Sequence[int], received: Sequence[int], group: Collectives, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = tuple(one.new_empty((sum(received), *one.shape[1:])) for one in tensors)
    for result, one in zip(results, tensors, strict=True):
        width = one.shape[1:].numel()
        group.all_to_all(
            result.view(-1),
            one.contiguous().view(-1),
            output_split_sizes=[num * width for num in received],
            input_split_sizes=[num * width for num in sent],
        ).wait()
    return results


def told(values: Iterable[Any]) -> str:
    """Name tensors by their shapes, and other values by their classes, for an error message."""
    return ", ".join(
        str(tuple(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in values
    )
