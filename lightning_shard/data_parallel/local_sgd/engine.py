"""The data-parallel engine with a switch: average gradients, or leave each rank to itself.

    together    backward ──all-reduce──> the average      as stage 0
    alone       backward ──────────────> the rank's own   nothing is sent

Alone, buffers (running statistics) are each rank's own, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.buffers import BufferSync
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.reducer import Reducer
from lightning_shard.data_parallel.usage import UsageAgreement


class LocalEngine(DataParallelEngine):
    """An engine of stage 0 whose gradients are averaged over changing groups of ranks.

    Attributes:
        is_alone: Whether ranks train by themselves now.
        buffers_moved: Whether a training step alone may have changed buffers; code that makes them
            equal on all ranks sets it back to False.
    """

    is_alone = False
    buffers_moved = False

    @property
    def buffers(self) -> BufferSync:
        """Synchronises the model's buffers."""
        return self._buffers

    def reduce_over(self, groups: DataGroups, *, alone: bool) -> None:
        """Average gradients over other ranks from now on; between two optimizer steps.

        Args:
            groups: Groups of the ranks to average over, made for gradients. Each rank must call.
            alone: Whether these groups hold this rank only.
        """
        if alone:
            self._buffers.end()  # as the next step together would
        for gradients in self.gradients:
            gradients.reduce_over(groups)
        usage = UsageAgreement(self.gradients, groups.dp, self.device)
        self.reducer = Reducer(self.gradients, groups.dp, usage)
        self.view = OptimizerView(self.gradients, self.reducer, None, self.absent, self.edits)
        self.is_alone = alone

    @property
    @override
    def ranks_of_loss(self) -> Collectives | None:
        return None if self.is_alone else super().ranks_of_loss

    @override
    @contextmanager
    def step(self) -> Iterator[None]:
        if not self.is_alone:
            with super().step():
                yield
            return
        self.adopt_assigned()
        self.hook_trainable()
        self.buffers_moved |= self.model.training and torch.is_grad_enabled()
        yield
