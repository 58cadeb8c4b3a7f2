"""The engine of ZeRO stage 1 with a switch: average gradients, or leave each rank its own.

    together    backward ──reduce-scatter──> a shard of the average     as stage 1
    alone       backward ──────────────────> the rank's own, full       nothing is sent

Alone, clipping goes by the rank's own norm, and buffers are its own. The optimizer's state stays in
shards: the view that is put in decides when and by which gradient it is updated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.reducer import Reducer, always
from lightning_shard.data_parallel.gradients.usage import UsageAgreement
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.phases import Phases


@dataclass(frozen=True)
class Update:
    """A step of the optimizer on this rank's shard."""

    grads: Sequence[Tensor | None]
    scale: float


class ShardOptimizerView(OptimizerView):
    """The view in which an optimizer takes steps by updates of its shard.

    Inside, each parameter shows the shard that this rank owns and `.grad` shows that shard's
    gradient. The learning rate is scaled for as long.
    """

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, own_update: Callable[[], Update]
    ) -> None:
        super().__init__([], reducer, None, Phases())
        self.flats: Sequence[FlatParameters] = ()
        self._optimizer, self._own_update = optimizer, own_update
        self._update: Update | None = None
        self._full_grads: list[Tensor | None] = []
        self._rates: list[float | Tensor] = []

    def apply(self, update: Update) -> None:
        """Let the optimizer take a step by peers' gradients."""
        self._update = update
        self._optimizer.step()

    def show_nothing_new(self) -> None:
        """Enter without a gradient, until `leave`."""
        self._update = Update([None for _ in self.params], 1.0)
        self.enter()

    @property
    def params(self) -> list[nn.Parameter]:
        """Every parameter that the updates change."""
        return [param for flat in self.flats for param in flat.params]

    @override
    def enter(self, shows: Callable[[], bool] = always) -> None:
        update, self._update = self._update or self._own_update(), None
        self._full_grads = [param.grad for param in self.params]
        self._show(None for _ in self.params)
        for flat in self.flats:
            flat.present_local()
        self._show(update.grads)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * update.scale

    @override
    def leave(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._show(None for _ in self.params)
        for flat in self.flats:
            flat.present_full()
        self._show(self._full_grads)
        self._full_grads = []

    def _show(self, grads: Iterable[Tensor | None]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad


class AsyncEngine(DataParallelEngine):
    """An engine whose ranks may train by themselves."""

    _together: tuple[OptimizerView, Reducer]  # those of ranks that are not alone

    def part(self, view: OptimizerView) -> None:
        """Leave each rank to itself from now on, and drop shards of averages; between two steps."""
        self._together, self.view, self.is_alone = (self.view, self.reducer), view, True
        usage = UsageAgreement(self.gradients, self.collectives, self.device)
        # This one is owed everything.
        self.reducer = Reducer(self.gradients, self.collectives, usage, self.phases)
        self._show_sums(True)
        self._drop_gradients()

    def rejoin(self) -> None:
        """Average gradients again."""
        (self.view, self.reducer), self.is_alone = self._together, False
        self._show_sums(False)
        self._drop_gradients()

    def _show_sums(self, shows: bool) -> None:
        """Let `.grad` be the rank's own gradient, or stand for the average."""
        for gradients in self.gradients:
            gradients.buffer.shows_sums = shows and not gradients.flat.has_master

    def _drop_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def share_buffers(self) -> None:
        """Take over rank 0's buffers if training alone may have changed them; each must call."""
        if self.buffers_moved:
            self.buffers.broadcast_changing()
        self.buffers_moved = False

    @override
    @contextmanager
    def optimizer_view(self) -> Iterator[None]:
        with nullcontext() if self.is_alone else super().optimizer_view():
            yield

    @override
    def average_gradients(self) -> None:
        if not self.is_alone:
            super().average_gradients()

    @property
    @override
    def steps_alone(self) -> bool:
        return self.is_alone and self.model.training and torch.is_grad_enabled()

    @override
    @contextmanager
    def backward(self, is_used: Callable[[], bool] = always) -> Iterator[None]:
        with self.no_sync() if self.is_alone else nullcontext(), super().backward(is_used):
            yield
