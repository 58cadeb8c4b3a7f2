"""Lets torchmetrics count every data-parallel rank once, not every rank of the world.

A metric gathers its state over torch's default group. Under tensor parallel several ranks there
see the same batch, and sums would count it several times. So the metrics of a module are told,
for the length of a run, to gather over the data-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

Gather = Callable[..., list[Tensor]]


class MetricGroups:
    """Lets the metrics in a module gather over a group until `restore`.

    Args:
        module: Module whose metrics without a group and a gathering function of their own are
            changed. Metrics that are not submodules cannot be found.
        group: Process group of the data-parallel ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        gather = _GatherOver(group)
        self._changed = [
            part
            for part in module.modules()
            if isinstance(part, Metric) and part.process_group is None and part.dist_sync_fn is None
        ]
        for metric in self._changed:
            metric.dist_sync_fn = gather

    def restore(self) -> None:
        """Give the metrics back as they were."""
        for metric in self._changed:
            metric.dist_sync_fn = None
        self._changed = []


class _GatherOver:
    """Gathers a metric's state over a group, also in copies; when unpickled, over the default."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        return gather_all_tensors(result, self._group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_GatherOver":
        return self

    def __reduce__(self) -> tuple[Callable[[], Gather], tuple[()]]:
        return _plain_gather, ()


def _plain_gather() -> Gather:
    return gather_all_tensors
