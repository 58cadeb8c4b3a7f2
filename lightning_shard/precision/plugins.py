"""Lightning's precision plugins, made to work on shards.

Lightning picks its plugin by looking at its own strategies, and clips gradients inside it; so each
plugin has a counterpart here that averages gradients after backward and clips by the full gradient.

A loss is scaled over shards: all ranks see the same overflow, and take or skip the same step.

Private names of torch's GradScaler, checked with torch 2.13; `tests/precision/test_scaler.py`
fails when one changes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
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

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.optim.clipping import clip_grad_norm, clip_grad_value


def device_scale(plugin: Any) -> Tensor | None:
    """Return what a precision plugin's scaler multiplies losses with, and leave it on the device.

    `get_scale` would have the host wait until the device has done all that is queued. The tensor,
    of shape (), does not change later; it is None where nothing is scaled.
    """
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    if scaler._scale is None:  # it has scaled nothing yet
        return torch.full((), scaler.get_scale(), device=scaler._device)
    return scaler._scale.clone()


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients that lie in shards on the ranks of some groups.

    It takes the settings and the state of the user's scaler, or of Lightning's; `view` shows the
    optimizer's shards while it is open.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        view: Callable[[], AbstractContextManager[None]],
        groups: Sequence[Collectives],
        device: torch.device,
    ) -> None:
        super().__init__(device.type, enabled=scaler.is_enabled())
        self.load_state_dict(scaler.state_dict())
        self._view = view
        self._groups = groups
        self._shard_device = device

    def plain(self) -> torch.amp.GradScaler:
        """Return a torch scaler with this one's settings and state."""
        scaler = torch.amp.GradScaler(self._shard_device.type, enabled=self.is_enabled())
        scaler.load_state_dict(self.state_dict())
        return scaler

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this rank's gradients by the scale, and look for overflow on any rank."""
        with self._view():
            super().unscale_(optimizer)
        self._agree_on_overflow(optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> Any:
        # the other way in: fused optimizers divide by the scale themselves
        with self._view():
            super()._check_inf_per_device(optimizer)
        return self._agree_on_overflow(optimizer)

    def _agree_on_overflow(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor]
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # a rank without a shard of these parameters
            found[self._shard_device] = torch.zeros((), device=self._shard_device)
        for flag in found.values():
            common = flag.to(self._shard_device)
            for group in self._groups:
                group.all_reduce(common, "max").wait()
            flag.copy_(common)
        return found


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
        if watched and self.engine is not None:
            self.engine.average_gradients()  # hooks see what the optimizer will
        super()._after_closure(model, optimizer)

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
