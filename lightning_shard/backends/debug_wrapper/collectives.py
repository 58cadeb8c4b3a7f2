"""The exchange collectives over a debug group, compared as collectives, not as their messages.

Collectives.reduce_scatter ─► compared ─► messages with reserved tags, which pass unchecked
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_shard.backends.debug_wrapper.process_group import DebugGroup
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.rank_order import C10D_OPS, ReduceOpName

_OPS: dict[str, Any] = {**C10D_OPS, "avg": ReduceOp.AVG}


def exchange_collectives(group: dist.ProcessGroup) -> ExchangeCollectives:
    """Wrap a group in exchange collectives, for a `DebugGroup` in those that compare."""
    return (DebugExchange if isinstance(group, DebugGroup) else ExchangeCollectives)(group)


class DebugExchange(ExchangeCollectives):
    """Exchange collectives whose ranks first compare what they call; for a `DebugGroup` alone."""

    def _all_reduce(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOpName
    ) -> StartedTransfer:
        self._compare("all_reduce", [source], reduce_op=_OPS[op])
        return super()._all_reduce(output, source, op)

    def _reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOpName
    ) -> StartedTransfer:
        self._compare("reduce_scatter", [source], [output], reduce_op=_OPS[op])
        return super()._reduce_scatter(output, source, op)

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor) -> StartedTransfer:
        self._compare("all_gather", [source])
        return super()._all_gather(output, source)

    def _compare(self, operation: str, *tensors: list[torch.Tensor], reduce_op: Any = None) -> None:
        assert isinstance(self.group, DebugGroup)
        self.group.comparer.compare(operation, *tensors, reduce_op=reduce_op)
