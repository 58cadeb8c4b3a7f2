"""The exchange collectives over a checked group: compared as what they are, not as messages.

Collectives.reduce_scatter ─► compared ─► messages with reserved tags, which pass unchecked
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_shard.backends.checked.process_group import CheckedGroup
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.pending import Transfer
from lightning_shard.backends.reduction import C10D_OPS, ReduceOpName

_OPS: dict[str, Any] = {**C10D_OPS, "avg": ReduceOp.AVG}


def exchange_collectives(group: dist.ProcessGroup) -> ExchangeCollectives:
    """Wrap a group in exchange collectives; compared ones where the group compares."""
    return (CheckedExchange if isinstance(group, CheckedGroup) else ExchangeCollectives)(group)


class CheckedExchange(ExchangeCollectives):
    """Exchange collectives whose ranks first compare what they call; for a `CheckedGroup` alone."""

    def _all_reduce(self, output: torch.Tensor, source: torch.Tensor, op: ReduceOpName) -> Transfer:
        self._compare("all_reduce", [source], reduce_op=_OPS[op])
        return super()._all_reduce(output, source, op)

    def _reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOpName
    ) -> Transfer:
        self._compare("reduce_scatter", [source], [output], reduce_op=_OPS[op])
        return super()._reduce_scatter(output, source, op)

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Transfer:
        self._compare("all_gather", [source])
        return super()._all_gather(output, source)

    def _compare(self, operation: str, *tensors: list[torch.Tensor], reduce_op: Any = None) -> None:
        assert isinstance(self.group, CheckedGroup)
        self.group.comparer.compare(operation, *tensors, reduce_op=reduce_op)
