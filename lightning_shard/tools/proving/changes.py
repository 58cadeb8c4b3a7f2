"""Changes to a module, one at a time, of which one may make a difference vanish.

Each takes a copy of the user's module and leaves out something that is known to depend on how the
samples are spread over ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import (
    forget_backward_hooks,
    forget_gradient_hooks,
    has_backward_hooks,
    has_gradient_hooks,
)

Change = Callable[[pl.LightningModule], None]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
)


def dropouts_of(module: nn.Module) -> list[str]:
    """Return the names of the modules that drop elements."""
    return [
        name for name, one in module.named_modules() if isinstance(one, _DROPOUTS) and one.p > 0
    ]


def batch_norms_of(module: nn.Module) -> list[str]:
    """Return the names of the batch norms that train with their batch's statistics."""
    return [
        name
        for name, one in module.named_modules()
        if isinstance(one, _BATCH_NORMS) and one.training
    ]


def without_dropout(module: pl.LightningModule) -> None:
    """Let nothing be dropped: by layers, and by numbers that others drop with as a function."""
    for one in module.modules():
        if isinstance(one, _DROPOUTS):
            one.p = 0.0
        for holder in (one, getattr(one, "config", None)):
            for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
                if "drop" in name and isinstance(value, float) and 0.0 < value < 1.0:
                    setattr(holder, name, 0.0)


def still(module: pl.LightningModule) -> None:
    """Let every module but batch norms compute as in evaluation."""
    for one in module.modules():
        one.training = isinstance(one, _BATCH_NORMS) and one.training


def with_fixed_statistics(module: pl.LightningModule) -> None:
    """Let batch norms use fixed statistics."""
    for one in module.modules():
        if isinstance(one, _BATCH_NORMS):
            one.training = False
            if one.running_mean is None:
                width = one.num_features
                one.running_mean, one.running_var = torch.zeros(width), torch.ones(width)


def without_parameter_hooks(module: pl.LightningModule) -> None:
    """Take the hooks off the parameters."""
    for param in module.parameters():
        forget_gradient_hooks(param)


def hooked_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that have hooks of the user's."""
    return [name for name, param in module.named_parameters() if has_gradient_hooks(param)]


def modules_with_backward_hooks(module: nn.Module) -> list[str]:
    """Return the names of the modules that have backward hooks of the user's."""
    return [name for name, one in module.named_modules() if has_backward_hooks(one)]


def without_backward_hooks(module: pl.LightningModule) -> None:
    """Take the backward hooks off the modules."""
    for one in module.modules():
        forget_backward_hooks(one)


def with_gathered_gradients(module: pl.LightningModule) -> None:
    """Let `all_gather` pass gradients back."""
    gather = module.all_gather

    def gathering(data: Any, group: Any = None, sync_grads: bool = True) -> Any:
        return gather(data, group, True)

    module.all_gather = gathering  # type: ignore[method-assign]


def overridden_hooks(module: pl.LightningModule) -> list[str]:
    """Return the names of Lightning's hooks that the user's module has."""
    return [name for name in _HOOKS if is_overridden(name, module, pl.LightningModule)]


def without_hook(name: str) -> Change:
    """Return a change that makes a hook Lightning's own."""

    def change(module: pl.LightningModule) -> None:
        setattr(module, name, partial(getattr(pl.LightningModule, name), module))

    return change


def without_updates(module: pl.LightningModule) -> None:
    """Let optimizers compute gradients and leave the weights."""

    def step(epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        closure()

    module.optimizer_step = step  # type: ignore[assignment,method-assign]


def without_callback(at: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's options without one of its callbacks."""
    callbacks: list[Callback] = list(options.get("callbacks") or ())
    return {**options, "callbacks": callbacks[:at] + callbacks[at + 1 :]}


def shared_storages(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of different parameters or buffers that lie in the same memory."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, value in _tensors_of(module).items():
        if value.numel() == 0:
            continue
        before, tensor = seen.setdefault(value.untyped_storage().data_ptr(), (name, value))
        if tensor is not value:
            yield before, name


def share_storages(module: nn.Module, original: nn.Module) -> None:
    """Let a copy's tensors share memory where the original's do: copies and formats undo it."""
    own, given = _tensors_of(module), _tensors_of(original)
    for one, two in shared_storages(original):
        if given[one].numel() == given[two].numel():
            own[two].data = own[one].data.as_strided(given[two].size(), given[two].stride())


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
