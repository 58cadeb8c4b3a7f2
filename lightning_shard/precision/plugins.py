"""Lightning's precision plugins, made to work on shards.

Lightning picks its plugin by looking at its own strategies, and clips gradients inside it; so each
plugin has a counterpart here that averages gradients after backward and clips by the full gradient.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.optim.clipping import clip_grad_norm, clip_grad_value
from lightning_shard.precision.scaler import ShardedGradScaler


class ShardedPrecision(Precision):
    """The plugin of 32-true, and the base of the others; its engine is None before `attach`.

    Attributes:
        grad_norm: Shape (): of the last gradient, before it was clipped by it; None until one was.
        clipped_by: The value that the last gradients were clipped by; None until some were.
    """

    engine: DataParallelEngine | None = None
    grad_norm: Tensor | None = None
    clipped_by: float | None = None

    def attach(self, engine: DataParallelEngine) -> None:
        """Work on this engine's gradients until `teardown`."""
        self.engine = engine

    @override
    def teardown(self) -> None:
        self.engine = None
        super().teardown()

    def _lent_view(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else self.engine.lent_view()

    @override
    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self.engine is not None and self.engine.options.same_bits:
            tensor = tensor * model.trainer.accumulate_grad_batches  # by which it was divided
        with nullcontext() if self.engine is None else self.engine.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def _after_closure(self, model: "pl.LightningModule", optimizer: Any) -> None:
        watched = any(
            is_overridden("on_before_optimizer_step", hooked)
            for hooked in (model, *model.trainer.callbacks)  # type: ignore[attr-defined]
        )
        if not watched:
            super()._after_closure(model, optimizer)
            return
        with self._publishing_edits(optimizer), self._lent_view():  # what the optimizer will see
            super()._after_closure(model, optimizer)

    def _publishing_edits(self, optimizer: Any) -> AbstractContextManager[None]:
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        return nullcontext() if self.engine is None else self.engine.publishing_edits(params)

    @override
    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip while the optimizer's view is suspended: a hook meets what is full as full."""
        with nullcontext() if self.engine is None else self.engine.view.suspended():
            super()._clip_gradients(*args, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.engine is not None
        params, self.clipped_by = list(self.main_params(optimizer)), float(clip_val)
        self.grad_norm = clip_grad_norm(params, self.clipped_by, self.engine)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.engine is not None
        self.clipped_by = float(clip_val)
        clip_grad_value(list(self.main_params(optimizer)), self.clipped_by, self.engine)


class ShardedHalfPrecision(ShardedPrecision, HalfPrecision):
    """The plugin of bf16-true and 16-true."""


class ShardedDoublePrecision(ShardedPrecision, DoublePrecision):
    """The plugin of 64-true."""


class ShardedMixedPrecision(ShardedPrecision, MixedPrecision):
    """The plugin of bf16-mixed and 16-mixed: compute in 16 bits, master copies in fp32."""

    @override
    def attach(self, engine: DataParallelEngine) -> None:
        super().attach(engine)
        if self.scaler is not None:
            groups = [engine.collectives, *engine.split.groups]
            self.scaler = ShardedGradScaler(
                self.scaler, engine.optimizer_view, groups, engine.device
            )

    @override
    def teardown(self) -> None:
        if isinstance(self.scaler, ShardedGradScaler):
            self.scaler = self.scaler.plain()  # ours would keep the engine's buffers alive
        super().teardown()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.pop(type(self).__qualname__, None)) is not None:
            checkpoint[MixedPrecision.__qualname__] = state  # where plain Lightning looks for it

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get(MixedPrecision.__qualname__)) is not None:
            self.load_state_dict(state)


def sharded_plugin(plugin: Precision | None) -> Precision | None:
    """Return this package's plugin that does what one of Lightning's does, or refuse it."""
    if plugin is None or isinstance(plugin, ShardedPrecision):
        return plugin
    sharded = _SHARDED.get(type(plugin))
    if sharded is None:
        raise ConfigError(
            f"The precision plugin {type(plugin).__name__} does not work on sharded models; use "
            f"Trainer(precision=...) with 32-true, 64-true, bf16-true, bf16-mixed, 16-true or "
            f"16-mixed."
        )
    return sharded(plugin)


_SHARDED: dict[type[Precision], Callable[[Any], ShardedPrecision]] = {
    Precision: lambda _: ShardedPrecision(),
    HalfPrecision: lambda plugin: ShardedHalfPrecision(plugin.precision),
    DoublePrecision: lambda _: ShardedDoublePrecision(),
    MixedPrecision: lambda plugin: ShardedMixedPrecision(
        plugin.precision, plugin.device, plugin.scaler
    ),
}
