"""The optimizer's view while ranks are alone: some ranks' gradients, on this rank's shard.

    optimizer.step(closure)    closure: backward, clipping; then the rank's own gradient, and more
    optimizer.step()           more that has come from peers

Inside, each parameter shows the shard that this rank owns and `.grad` shows that shard's gradient.
The learning rate is scaled for as long: the owner's own, as its scheduler has set it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.reducer import Reducer, always


@dataclass(frozen=True)
class Update:
    """A step of the optimizer on this rank's shard.

    Attributes:
        grads: This rank's shard of each parameter's gradient; None where there is none.
        scale: Factor of the learning rate.
    """

    grads: Sequence[Tensor | None]
    scale: float


class ShardOptimizerView(OptimizerView):
    """The view in which an optimizer takes steps by updates of its shard.

    Args:
        reducer: The engine's reducer; gradients that it has accumulated are not reduced.
        optimizer: The optimizer, whose state lies in shards.
        own_update: Called when the optimizer is about to take this rank's own step.

    Attributes:
        flats: Buffers of the parameters that the updates change, in order.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: Optimizer,
        own_update: Callable[[], Update],
    ) -> None:
        super().__init__([], reducer, None)
        self.flats: Sequence[FlatParameters] = ()
        self._optimizer, self._own_update = optimizer, own_update
        self._update: Update | None = None
        self._full_grads: list[Tensor | None] = []
        self._rates: list[float | Tensor] = []

    def apply(self, update: Update) -> None:
        """Let the optimizer take a step by peers' gradients."""
        self._update = update
        self._optimizer.step()

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
