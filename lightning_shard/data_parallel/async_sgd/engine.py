"""The engine of ZeRO stage 1 with a switch: average gradients, or leave each rank its own.

    together    backward ──reduce-scatter──> a shard of the average     as stage 1
    alone       backward ──────────────────> the rank's own, full       nothing is sent

Alone, parameters and gradients show themselves full, clipping goes by the rank's own norm, and
buffers (running statistics) are each rank's own. The optimizer's state stays in shards: the view
that is put in decides when and by which gradient it is updated.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.reducer import Reducer, always
from lightning_shard.data_parallel.usage import UsageAgreement


class AsyncEngine(DataParallelEngine):
    """An engine whose ranks may train by themselves."""

    _together: tuple[OptimizerView, Reducer] | None = None  # while ranks are alone
    _buffers_moved = False

    def part(self, view: OptimizerView) -> None:
        """Leave each rank to itself from now on; between two optimizer steps.

        Gradients left of the last step together are dropped: they are shards of an average.

        Args:
            view: The view in which the optimizer updates this rank's shards.
        """
        self._together, self.view = (self.view, self.reducer), view
        usage = UsageAgreement(self.gradients, self.collectives, self.device)
        self.reducer = Reducer(self.gradients, self.collectives, usage)  # is owed everything
        self._show_sums(True)
        self._drop_gradients()

    def rejoin(self) -> None:
        """Average gradients again."""
        assert self._together is not None
        (self.view, self.reducer), self._together = self._together, None
        self._show_sums(False)
        self._drop_gradients()

    def _show_sums(self, shows: bool) -> None:
        """Let `.grad` be the rank's own gradient, or stand for the average."""
        for gradients in self.gradients:
            gradients.buffer.shows_sums = shows and not gradients.flat.has_master

    def _drop_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    @property
    def is_alone(self) -> bool:
        """Whether ranks train by themselves now."""
        return self._together is not None

    def share_buffers(self) -> None:
        """Take over rank 0's buffers if training alone may have changed them; each must call."""
        if self._buffers_moved:
            self._buffers.broadcast_changing()
        self._buffers_moved = False

    @property
    @override
    def groups_of_gradients(self) -> list[Collectives]:
        return [] if self.is_alone else super().groups_of_gradients

    @property
    @override
    def ranks_of_loss(self) -> Collectives | None:
        return None if self.is_alone else super().ranks_of_loss

    @override
    @contextmanager
    def optimizer_view(self) -> Iterator[None]:
        with nullcontext() if self.is_alone else super().optimizer_view():
            yield

    @contextmanager
    @override
    def lent_view(self) -> Iterator[None]:
        with nullcontext() if self.is_alone else super().lent_view():
            yield

    @override
    @contextmanager
    def publishing_edits(self, updated: Iterable[nn.Parameter]) -> Iterator[None]:
        with nullcontext() if self.is_alone else super().publishing_edits(updated):
            yield

    @override
    def begin_update(self, params: Iterable[nn.Parameter], *, in_place: bool = True) -> None:
        if not self.is_alone:
            super().begin_update(params, in_place=in_place)

    @override
    @contextmanager
    def step(self) -> Iterator[None]:
        if not (self.is_alone and self.model.training and torch.is_grad_enabled()):
            with super().step():
                yield
            return
        self.adopt_assigned()
        self.hook_trainable()
        self._buffers_moved = True
        yield

    @override
    @contextmanager
    def backward(self, is_used: Callable[[], bool] = always) -> Iterator[None]:
        with self.no_sync() if self.is_alone else nullcontext(), super().backward(is_used):
            yield
