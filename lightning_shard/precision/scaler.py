"""Loss scaling over shards: all ranks see the same overflow, and take or skip the same step.

Private names of torch's GradScaler, checked with torch 2.13; `tests/precision/test_plugins.py`
fails when one changes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives


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
